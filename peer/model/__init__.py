"""The model: LLaMa layers, and the stages they are cut into."""
