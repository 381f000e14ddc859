"""With a trusted curator."""
