"""The parts of the product under test, set up in this process or in processes of their own."""
