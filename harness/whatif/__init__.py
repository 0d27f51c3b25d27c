"""What a recorded run would have reserved under other settings of the caching allocator."""
