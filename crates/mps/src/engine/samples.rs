//! Timestamps of the device: slots in buffers of counter samples.
//!
//! A device samples at the boundaries of a pass, so a timestamp has a pass of its own, with two
//! samples. The time is that of the pass's end: the start of a pass may come before its waits. The
//! number of sample buffers of a process is small, so many slots share one.
//!
//! This module must not know streams.

use crate::driver::ops::NativeSampleBuffer;
use crate::manager::opened::{OpenedDevice, Owned};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Result};
use std::fmt;

/// Slots of a sample buffer.
const SLOTS: u32 = 256;
/// The result of a sample that failed.
const FAILED: u64 = u64::MAX;

#[derive(Default)]
struct Blocks {
    buffers: Vec<Owned<NativeSampleBuffer>>,
    free: Vec<u64>,
}

/// The slots of a device.
pub(crate) struct Samples {
    device: Arc<OpenedDevice>,
    blocks: Mutex<Blocks>,
}

impl Samples {
    pub(crate) fn new(device: &Arc<OpenedDevice>) -> Self {
        Self { device: device.clone(), blocks: Mutex::default() }
    }

    /// Takes a slot. May block on the driver.
    ///
    /// # Errors
    /// `Unsupported` on a device without timestamps at the boundaries of a pass; a driver error.
    pub(crate) fn take(&self) -> Result<u64> {
        if !self.device.properties.stage_counters {
            let text =
                format!("{} samples no timestamps at the boundaries of a pass", self.device.id);
            return Err(Error::Unsupported(text.into()));
        }
        loop {
            if let Some(slot) = self.blocks.lock().free.pop() {
                return Ok(slot);
            }
            let (ops, device) = (&self.device.ops, self.device.native);
            // SAFETY: the device is open as long as this value holds it.
            let native = unsafe { ops.samples_create(device, 2 * SLOTS)? };
            let mut blocks = self.blocks.lock();
            let from = blocks.buffers.len() as u64 * u64::from(SLOTS);
            blocks.buffers.push(Owned::new(&self.device, native));
            blocks.free.extend((from..from + u64::from(SLOTS)).rev());
        }
    }

    /// Gives a slot back. No uncompleted work writes it.
    pub(crate) fn give_back(&self, slot: u64) {
        self.blocks.lock().free.push(slot);
    }

    /// The sample buffer of a slot, and the slot's two samples. The buffer lives as long as this
    /// value.
    ///
    /// # Errors
    /// `InvalidArgument` for a slot that does not exist.
    pub(crate) fn of(&self, slot: u64) -> Result<(NativeSampleBuffer, u32, u32)> {
        let blocks = self.blocks.lock();
        let block = blocks.buffers.get((slot / u64::from(SLOTS)) as usize);
        let block = block.ok_or_else(|| Error::invalid("the timestamp is not of this device"))?;
        let first = 2 * (slot % u64::from(SLOTS)) as u32;
        Ok((block.native, first, first + 1))
    }

    /// The time of a slot whose pass is over, in nanoseconds; `None` for a sample that failed.
    pub(crate) fn time(&self, slot: u64) -> Option<u64> {
        let (samples, _, end) = self.of(slot).ok()?;
        // SAFETY: this value keeps the sample buffer live, and the slot is in it. The caller knows
        // that the pass is over.
        let times = unsafe { self.device.ops.samples_resolve(samples, end..end + 1) };
        times.ok()?.first().copied().filter(|&time| time != FAILED)
    }
}

impl fmt::Debug for Samples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let blocks = self.blocks.lock();
        write!(f, "Samples({} buffers, {} free)", blocks.buffers.len(), blocks.free.len())
    }
}
