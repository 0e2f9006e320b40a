"""What is done to a user's network so that one set of weights serves many members."""
