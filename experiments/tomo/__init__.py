"""Parts of `tomography.py`: the table of small images, large images, pictures of priors, and what they cost."""
