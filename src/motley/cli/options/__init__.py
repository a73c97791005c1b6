"""The flags of all commands: a module for each kind. A flag that llama.cpp also has has the same name.

A flag is a type: a command that takes it has a parameter of this type. Dataclasses group flags that several commands
take: add a flag as a field, and all of these commands have it (`cli/grouping.py`).
"""
