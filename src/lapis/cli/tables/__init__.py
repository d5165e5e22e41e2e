"""Commands about tables: a network with error bars from a file of columns, and what can be done with it."""
