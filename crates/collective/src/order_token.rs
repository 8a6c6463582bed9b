//! The order token: what gives the collectives of a device one order.
//!
//! A token is a block of the device that no kernel touches. Each collective has it as an operand
//! that it writes. So the runtime orders a device's collectives as they are submitted, over all
//! streams, graphs and communicators. A library needs that: two collectives that run at the same
//! time on one device may wait for each other.
//!
//! The token is written as a whole and never read. So a collective that failed does not fail those
//! that are submitted once it is over.
//!
//! Ranks that are threads share a device, and must not wait for each other's tokens. So the token
//! is of a world and a device.
//!
//! This module must not know worlds.

use leasehold::backend::sync::atomic::{AtomicU64, Ordering};
use leasehold::backend::sync::{Arc, Mutex};
use leasehold::{Buffer, Lease, Result, Runtime};
use std::sync::Weak;

/// Bytes of a token: those of the smallest block.
const BYTES: u64 = 256;

/// The order token of a device.
pub(crate) struct OrderToken {
    pub(crate) buffer: Lease<Buffer>,
    /// Distinguishes the tokens of a process.
    pub(crate) serial: u64,
    /// Held from the check of a call that is checked on the host up to its submission. So checks
    /// have the order that their calls get.
    pub(crate) checks: Mutex<()>,
    runtime: Runtime,
}

impl OrderToken {
    /// A token of its own.
    pub(crate) fn new(runtime: &Runtime) -> Result<Arc<Self>> {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let buffer = runtime.alloc(BYTES)?.unlisted()?;
        buffer.set_name("order token");
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(Self { buffer, serial, checks: Mutex::default(), runtime: runtime.clone() }))
    }
}

/// The lock of a device for libraries that want one call at a time. It is the runtime's, whatever
/// the world.
#[derive(Default)]
pub(crate) struct Turn(pub(crate) Mutex<()>);

impl Turn {
    pub(crate) fn of(runtime: &Runtime) -> Result<Arc<Self>> {
        runtime.extension(|_| Ok(Self::default()))
    }
}

/// The tokens of a world's devices. Communicators keep them.
#[derive(Default)]
pub(crate) struct OrderTokens(Mutex<Vec<Weak<OrderToken>>>);

impl OrderTokens {
    /// The order token of a device.
    pub(crate) fn of(&self, runtime: &Runtime) -> Result<Arc<OrderToken>> {
        let mut tokens = self.0.lock();
        tokens.retain(|token| token.strong_count() != 0);
        let found = tokens.iter().filter_map(Weak::upgrade).find(|t| t.runtime.same(runtime));
        if let Some(token) = found {
            return Ok(token);
        }
        let token = OrderToken::new(runtime)?;
        tokens.push(Arc::downgrade(&token));
        Ok(token)
    }
}
