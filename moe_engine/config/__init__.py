"""What a run is made of: the schema (dataclasses), its loading from YAML and the command line, its rules."""
