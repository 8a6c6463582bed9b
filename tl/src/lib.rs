//! The memory manager for compiled code: scopes, function frames, reference counts and a tensor
//! pool, behind a C ABI.
//!
//! The callers are functions that an LLVM-based compiler emits. They call the C ABI ([`ffi`],
//! header `leasehold_memory.h`) very often and not always correctly. So frequent calls take no
//! global lock and mostly no lock at all. No call panics, aborts or unwinds, whatever its
//! arguments: a misuse is counted ([`Misuse`]) and has no effect. Rust programs use
//! [`MemoryManager`] and [`TensorPool`]. The requirement is document 004.
//!
//! Three types to know: a [`MemoryManager`] is a thread's scopes and counts, a [`TensorPool`] keeps
//! tensors for reuse, and a [`Misuse`] is a wrong call.
//!
//! ```
//! use leasehold_memory::MemoryManager;
//! let mut memory = MemoryManager::new();
//! memory.enter_scope();
//! memory.exit_scope(); // releases what the scope holds
//! ```
//!
//! - object table. File: `table.rs`, `lock.rs`. Owns: address → kind, count, generation,
//!   back-link. Must not: know scopes, dereference objects.
//! - shared state. File: `shared.rs`, `pools.rs`, `pool.rs`. Owns: pool, hooks, limits, totals.
//!   Must not: call out under a lock.
//! - one thread. File: `local.rs`, `links.rs`, `destroy.rs`, and above them `record.rs`,
//!   `forgotten.rs`, `scope.rs`, `frame.rs`, `detach.rs`. Owns: scopes, records,
//!   frames, slots, quarantine. Must not: touch another thread's.
//! - the process's manager. File: `global.rs`, `tls.rs`. Owns: attachments of threads, their ends,
//!   forks. Must not: know what is called.
//! - interfaces. File: `manager.rs`, `ffi.rs`, `tensor_pool.rs`. Owns: translation. Must not:
//!   decide anything.
//!
//! The files lead to each other without a circle, by imports and by calls of methods.

#[cfg(all(feature = "bench", not(loom)))]
pub mod bench;
mod dead;
mod destroy;
mod detach;
mod env;
#[cfg(not(loom))]
pub mod ffi;
mod forgotten;
mod frame;
#[cfg(not(loom))]
mod global;
mod heap;
mod links;
mod local;
mod lock;
mod log;
mod manager;
mod misuse;
mod names;
mod pool;
mod pools;
mod record;
mod report;
mod scope;
mod shared;
mod stack;
mod stats;
mod table;
mod tensor_pool;
#[cfg(not(loom))]
mod tls;
mod vec_ptr;
#[cfg(all(feature = "bench", not(loom)))]
pub mod workload;

pub use manager::MemoryManager;
pub use misuse::{LastError, MISUSE_COUNT, Misuse};
pub use pool::{
    DeviceTypeId, ElementTypeId, OpaqueTensor, PoolLimits, PoolOutcome, TensorDestructor, TensorKey,
};
pub use report::{LeakGroup, LeakReport};
pub use shared::{
    Config, CustomDestructor, ScopeEnterHook, ScopeExitHook, TensorDescriber, TensorInfo,
};
pub use stats::Stats;
pub use table::Kind;
pub use tensor_pool::TensorPool;
pub use vec_ptr::{VecOps, VecPtr};
