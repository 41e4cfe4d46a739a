"""Text for people: numbers with units, tables, JSON, and hidden secrets."""
