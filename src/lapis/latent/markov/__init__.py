"""Hidden Markov models: the chain of states, what states emit, and the model of both."""
