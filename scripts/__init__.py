"""What is run in a clone of the repository and is no part of the installed package."""
