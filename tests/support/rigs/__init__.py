"""Parts of the product under test, in this process or in processes of their own; one package per part."""
