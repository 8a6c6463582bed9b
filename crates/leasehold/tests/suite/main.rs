//! Behaviour of the runtime at its public API, on the CPU backend.

mod arrays;
mod between;
mod borrowed;
mod common;
mod compile_fail;
mod contexts;
mod copies;
#[cfg(feature = "cuda")]
mod cuda_sources;
mod errors;
mod events;
mod forged;
#[cfg(feature = "future")]
mod futures;
#[cfg(feature = "cuda")]
mod graph_budget;
mod graph_updates;
mod graphs;
mod growing;
mod growing_parts;
mod host_timelines;
#[cfg(feature = "cuda")]
mod interop;
mod kernels;
#[cfg(feature = "cuda")]
mod large;
mod loops;
mod ops;
mod passed;
mod pinned;
mod pinned_arrays;
mod recordings;
mod runtime;
mod share;
mod suspend;
mod threads;
mod traces;
mod typed_kernels;
