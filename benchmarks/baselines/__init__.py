"""The contenders, each a generator that trains and yields the mean loss of every finished round.

`python -m benchmarks.baselines NAME --model micro --seconds 20` measures one of them alone. They know nothing of each
other; what they share is the workload.
"""
