"""Models of the product, and checks of a store, a trail or a daemon against them."""
