"""What a run will cost, by arithmetic on its configuration: FLOPs, memory, messages, time, best layout. No torch."""
