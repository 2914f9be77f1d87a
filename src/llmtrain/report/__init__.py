"""Everything a person sees, and the JSON twin of each."""
