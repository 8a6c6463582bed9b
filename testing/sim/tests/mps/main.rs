//! Metal over the simulated driver: the driver's rules, the managers, the backend and its streams.

mod backend;
mod driver;
mod managers;
mod streams;
