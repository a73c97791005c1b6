"""How the bundled model is made. See README.md beside this file."""
