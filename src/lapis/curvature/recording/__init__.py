"""Recording a forward pass: which functions used which weights, on which inputs, and along which axis examples lie."""
