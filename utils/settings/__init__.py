"""How settings are declared, checked, read from flags and files, and explained. Standard library only."""
