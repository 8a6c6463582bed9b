//! Behaviour at the public API and at the C ABI. Programs for other languages are under `c/` and
//! `ir/`.

mod api;
mod c_abi;
mod pool;
mod programs;
mod tensors;
mod threads;
