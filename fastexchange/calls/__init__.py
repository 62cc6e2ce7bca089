"""What a kernel for the CPU is, and what becomes of its calls; what they return."""
