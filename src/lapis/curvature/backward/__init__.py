"""From seeds at the outputs back to the layers: gradients, and what they say about each site's weights."""
