"""What is done to the store of a stopped daemon as a whole: looking through it, and saving what can be read of it."""
