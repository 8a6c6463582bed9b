//! CUDA's own behaviour, over the simulated driver. Nothing has a thread of its own, so every run
//! is the same.

mod attributes;
mod common;
mod copies;
mod external;
mod faults;
mod life;
mod loops;
mod loss;
mod managers;
mod order;
mod peers;
mod random_order;
mod release;
mod tensor_maps;
