//! Operations on blocks through views: zero, copy, write, gather. The bodies are in `kernels/`.
