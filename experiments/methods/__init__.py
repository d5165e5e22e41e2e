"""Every method on the same networks and data: what the comparisons beside this folder share."""
