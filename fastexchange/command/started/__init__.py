"""The folder that ``command.program`` puts before the others of PYTHONPATH: ``site`` imports ``sitecustomize`` from it."""
