"""What `diffusers-rocm doctor` looks at: the machine as it stands, and what it does when it is tried."""
