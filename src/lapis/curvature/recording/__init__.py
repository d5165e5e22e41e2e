"""What a forward pass leaves behind: which function took which weights, and where its examples lay."""
