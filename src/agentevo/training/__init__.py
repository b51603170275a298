"""The trainers: from trajectories to an update of the weights."""
