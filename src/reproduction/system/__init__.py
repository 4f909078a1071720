"""What the machine, its files and its terminal ask for."""
