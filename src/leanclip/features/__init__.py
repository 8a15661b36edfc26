"""Features of samples by id, in mapped tables; locked towers fill them once."""
