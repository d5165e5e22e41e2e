"""Linear maps from images to data: X-ray projections, blurs, missing pixels, coarser grids."""
