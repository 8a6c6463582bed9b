//! Files from outside, and the cache of compiled kernels.

mod cache_processes;
mod files;
