"""The only modules that touch diffusers, transformers and peft, behind typed functions."""
