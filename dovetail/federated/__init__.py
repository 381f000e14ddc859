"""What clients and server do in a round, apart from privacy: local steps, who takes part, the server's step."""
