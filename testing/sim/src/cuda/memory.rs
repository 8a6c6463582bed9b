//! Memory of the simulated driver.
//!
//! This module must not know allocators.

use super::tables::{Allocation, Mapping, Piece, Pinned, Tables};
use super::{Scope, SimDriver, refuse};
use crate::GRANULARITY;
use leasehold_core::{Error, Result};
use leasehold_cuda::driver::codes::code;
use leasehold_cuda::driver::ops::{
    HostFlags, MemoryOps, NativeMemory, NativeMemoryInfo, NativeStream,
};
use std::os::fd::OwnedFd;

/// Limits of a launch, as on a device of capability 9.0.
pub(super) const BLOCK_THREADS: u32 = 1024;
pub(super) const BLOCK: [u32; 3] = [1024, 1024, 64];
pub(super) const GRID: [u32; 3] = [0x7fff_ffff, 0xffff, 0xffff];
pub(super) const SHARED: u32 = 48 << 10;
pub(super) const SHARED_OPTIN: u32 = 227 << 10;

impl SimDriver {
    fn needs_vmm(&self, api: &'static str) -> Result<()> {
        if self.config.vmm { Ok(()) } else { Err(refuse(api, code::NOT_SUPPORTED)) }
    }

    fn needs_pools(&self, api: &'static str) -> Result<()> {
        if self.config.memory_pools { Ok(()) } else { Err(refuse(api, code::NOT_SUPPORTED)) }
    }

    /// Translates an answer of the machine.
    fn answer<T>(
        &self,
        api: &'static str,
        scope: Scope,
        bytes: u64,
        answer: Result<T>,
    ) -> Result<T> {
        answer.map_err(|e| self.told(api, scope.device, bytes, e))
    }
}

impl Tables {
    fn allocation(&self, api: &'static str, addr: u64, context: u64) -> Result<Allocation> {
        let found =
            self.allocations.get(&addr).copied().ok_or_else(|| refuse(api, code::INVALID_VALUE))?;
        if found.context == context { Ok(found) } else { Err(refuse(api, code::INVALID_VALUE)) }
    }
}

/// Checks that physical memory can have this size.
fn granular(api: &'static str, bytes: u64) -> Result<()> {
    if bytes != 0 && bytes.is_multiple_of(GRANULARITY) {
        Ok(())
    } else {
        Err(refuse(api, code::INVALID_VALUE))
    }
}

impl MemoryOps for SimDriver {
    fn memory_info(&self) -> Result<NativeMemoryInfo> {
        let scope = self.enter("cuMemGetInfo")?;
        let (used, total) = self.machine.device_memory(scope.device)?;
        Ok(NativeMemoryInfo { free: total - used, total })
    }

    fn alloc(&self, bytes: u64) -> Result<u64> {
        const API: &str = "cuMemAlloc";
        let scope = self.enter(API)?;
        let mut tables = self.lock();
        tables.forbidden_in_capture(API)?;
        let addr = self.machine.alloc(scope.device, bytes);
        drop(tables);
        let addr = self.answer(API, scope, bytes, addr)?;
        tables = self.lock();
        tables
            .allocations
            .insert(addr, Allocation { context: scope.context, device: scope.device });
        Ok(addr)
    }

    unsafe fn free(&self, addr: u64) -> Result<()> {
        const API: &str = "cuMemFree";
        let (scope, told) = self.enter_teardown(API)?;
        let allocation = {
            let mut tables = self.lock();
            tables.forbidden_in_capture(API)?;
            if addr == 0 {
                return told;
            }
            let allocation = tables.allocation(API, addr, scope.context)?;
            tables.allocations.remove(&addr);
            allocation
        };
        self.drain(allocation.device);
        told.and(self.answer(API, scope, 0, self.machine.free(addr)))
    }

    unsafe fn alloc_async(&self, bytes: u64, stream: NativeStream) -> Result<u64> {
        const API: &str = "cuMemAllocAsync";
        let scope = self.enter(API)?;
        self.ensure_default(scope, stream)?;
        self.needs_pools(API)?;
        let stream = {
            let mut tables = self.lock();
            let stream = tables.stream(API, scope, stream)?;
            tables.forbidden_on_captured(API, stream.0)?;
            tables.forbidden_in_capture(API)?;
            stream.1
        };
        if bytes == 0 {
            return Ok(0);
        }
        let addr = self.answer(API, scope, bytes, self.machine.alloc_async(stream.queue, bytes))?;
        let allocation = Allocation { context: scope.context, device: scope.device };
        self.lock().allocations.insert(addr, allocation);
        Ok(addr)
    }

    unsafe fn free_async(&self, addr: u64, stream: NativeStream) -> Result<()> {
        const API: &str = "cuMemFreeAsync";
        let (scope, told) = self.enter_teardown(API)?;
        self.ensure_default(scope, stream)?;
        self.needs_pools(API)?;
        let stream = {
            let mut tables = self.lock();
            let stream = tables.stream(API, scope, stream)?;
            tables.forbidden_on_captured(API, stream.0)?;
            if addr == 0 {
                return told;
            }
            tables.allocation(API, addr, scope.context)?;
            tables.allocations.remove(&addr);
            stream.1
        };
        told.and(self.answer(API, scope, 0, self.machine.free_async(stream.queue, addr)))
    }

    fn pool_set_threshold(&self, ordinal: u32, _bytes: u64) -> Result<()> {
        self.enter("cuMemPoolSetAttribute")?;
        self.check_ordinal("cuDeviceGet", ordinal)?;
        self.needs_pools("cuDeviceGetDefaultMemPool")
    }

    fn pool_trim(&self, ordinal: u32, _keep: u64) -> Result<()> {
        self.enter("cuMemPoolTrimTo")?;
        self.check_ordinal("cuDeviceGet", ordinal)?;
        self.needs_pools("cuDeviceGetDefaultMemPool")
    }

    fn granularity(&self, ordinal: u32) -> Result<u64> {
        const API: &str = "cuMemGetAllocationGranularity";
        self.enter(API)?;
        self.check_ordinal(API, ordinal)?;
        self.needs_vmm(API)?;
        Ok(GRANULARITY)
    }

    fn address_reserve(&self, bytes: u64, align: u64) -> Result<u64> {
        const API: &str = "cuMemAddressReserve";
        let scope = self.enter(API)?;
        self.needs_vmm(API)?;
        granular(API, bytes)?;
        let addr = self.answer(API, scope, bytes, self.machine.reserve(bytes, align))?;
        self.lock().reservations.insert(addr, bytes);
        Ok(addr)
    }

    unsafe fn address_free(&self, addr: u64, bytes: u64) -> Result<()> {
        const API: &str = "cuMemAddressFree";
        let (scope, told) = self.enter_teardown(API)?;
        self.needs_vmm(API)?;
        if self.lock().reservations.get(&addr) != Some(&bytes) {
            return Err(refuse(API, code::INVALID_VALUE));
        }
        let released = self.machine.release(addr, bytes);
        // The addresses of a lost device are gone.
        if released.is_ok() || matches!(released, Err(Error::DeviceLost { .. })) {
            self.lock().reservations.remove(&addr);
        }
        told.and(self.answer(API, scope, 0, released))
    }

    fn memory_create(&self, ordinal: u32, bytes: u64) -> Result<NativeMemory> {
        const API: &str = "cuMemCreate";
        let scope = self.enter(API)?;
        self.check_ordinal(API, ordinal)?;
        self.needs_vmm(API)?;
        granular(API, bytes)?;
        let id = self.answer(API, scope, bytes, self.machine.create(ordinal, bytes))?;
        let mut tables = self.lock();
        let handle = tables.handle();
        tables.pieces.insert(handle, Piece { id, bytes });
        Ok(NativeMemory(handle))
    }

    fn shared_granularity(&self, ordinal: u32) -> Result<u64> {
        self.granularity(ordinal)
    }

    fn shared_memory_create(&self, ordinal: u32, bytes: u64) -> Result<NativeMemory> {
        const API: &str = "cuMemCreate";
        let scope = self.enter(API)?;
        self.check_ordinal(API, ordinal)?;
        self.needs_vmm(API)?;
        granular(API, bytes)?;
        let id = self.answer(API, scope, bytes, self.machine.create_shared(ordinal, bytes))?;
        let mut tables = self.lock();
        let handle = tables.handle();
        tables.pieces.insert(handle, Piece { id, bytes });
        Ok(NativeMemory(handle))
    }

    unsafe fn memory_export(&self, memory: NativeMemory) -> Result<OwnedFd> {
        const API: &str = "cuMemExportToShareableHandle";
        let scope = self.enter(API)?;
        let piece = self.lock().pieces.get(&memory.0).copied();
        let piece = piece.ok_or_else(|| refuse(API, code::INVALID_VALUE))?;
        self.answer(API, scope, 0, self.machine.export(piece.id))
    }

    fn memory_import(&self, descriptor: OwnedFd) -> Result<NativeMemory> {
        const API: &str = "cuMemImportFromShareableHandle";
        let scope = self.enter(API)?;
        self.needs_vmm(API)?;
        let imported = self.machine.import(scope.device, descriptor);
        let (id, bytes) = self.answer(API, scope, 0, imported)?;
        let mut tables = self.lock();
        let handle = tables.handle();
        tables.pieces.insert(handle, Piece { id, bytes });
        Ok(NativeMemory(handle))
    }

    unsafe fn memory_release(&self, memory: NativeMemory) -> Result<()> {
        const API: &str = "cuMemRelease";
        let (scope, told) = self.enter_teardown(API)?;
        let piece =
            self.lock().pieces.remove(&memory.0).ok_or_else(|| refuse(API, code::INVALID_VALUE))?;
        told.and(self.answer(API, scope, 0, self.machine.destroy(piece.id)))
    }

    unsafe fn map(&self, addr: u64, bytes: u64, memory: NativeMemory) -> Result<()> {
        const API: &str = "cuMemMap";
        let scope = self.enter(API)?;
        let tables = self.lock();
        let piece = tables
            .pieces
            .get(&memory.0)
            .copied()
            .ok_or_else(|| refuse(API, code::INVALID_VALUE))?;
        if bytes != piece.bytes {
            return Err(refuse(API, code::NOT_SUPPORTED));
        }
        drop(tables);
        self.answer(API, scope, bytes, self.machine.map(addr, piece.id))?;
        self.lock().mappings.insert(addr, Mapping { bytes, reachable: false });
        Ok(())
    }

    unsafe fn unmap(&self, addr: u64, bytes: u64) -> Result<()> {
        const API: &str = "cuMemUnmap";
        let (scope, told) = self.enter_teardown(API)?;
        let unmapped = self.machine.unmap(addr, bytes);
        if unmapped.is_ok() {
            self.lock().mappings.retain(|&at, _| at < addr || at >= addr + bytes);
        }
        told.and(self.answer(API, scope, 0, unmapped))
    }

    unsafe fn set_access(&self, addr: u64, bytes: u64, ordinals: &[u32]) -> Result<()> {
        const API: &str = "cuMemSetAccess";
        let scope = self.enter(API)?;
        if ordinals.iter().any(|&ordinal| ordinal >= self.config.machine.devices) {
            return Err(refuse(API, code::INVALID_VALUE));
        }
        for &ordinal in ordinals {
            self.answer(API, scope, 0, self.machine.set_access(ordinal, addr, bytes))?;
            let mut tables = self.lock();
            tables
                .mappings
                .range_mut(addr..addr + bytes)
                .for_each(|(_, mapping)| mapping.reachable = true);
        }
        Ok(())
    }

    fn host_alloc(&self, bytes: u64, _flags: HostFlags) -> Result<u64> {
        const API: &str = "cuMemHostAlloc";
        let scope = self.enter(API)?;
        self.lock().forbidden_in_capture(API)?;
        if bytes == 0 {
            return Ok(0);
        }
        let addr = self.answer(API, scope, bytes, self.machine.host_alloc(bytes))?;
        self.lock()
            .pinned
            .insert(addr, Pinned { context: scope.context, bytes, registered: false });
        Ok(addr)
    }

    unsafe fn host_free(&self, addr: u64) -> Result<()> {
        const API: &str = "cuMemFreeHost";
        let (scope, told) = self.enter_teardown(API)?;
        {
            let mut tables = self.lock();
            tables.forbidden_in_capture(API)?;
            if addr == 0 {
                return told;
            }
            match tables.pinned.get(&addr) {
                Some(range) if !range.registered => tables.pinned.remove(&addr),
                _ => return Err(refuse(API, code::INVALID_VALUE)),
            };
        }
        told.and(self.answer(API, scope, 0, self.machine.host_free(addr)))
    }

    unsafe fn host_register(&self, addr: u64, bytes: u64) -> Result<()> {
        const API: &str = "cuMemHostRegister";
        let scope = self.enter(API)?;
        let Some(end) = addr.checked_add(bytes).filter(|_| bytes != 0 && addr != 0) else {
            return Err(refuse(API, code::INVALID_VALUE));
        };
        let mut tables = self.lock();
        let before = tables.pinned.range(..end).next_back();
        if let Some((_, range)) = before.filter(|&(&at, range)| at + range.bytes > addr) {
            let registered = code::HOST_MEMORY_ALREADY_REGISTERED;
            return Err(refuse(
                API,
                if range.registered { registered } else { code::INVALID_VALUE },
            ));
        }
        // SAFETY: the caller vouches that the memory stays until it is unregistered.
        let answer = unsafe { self.machine.host_register(addr, bytes) };
        if answer.is_ok() {
            tables.pinned.insert(addr, Pinned { context: scope.context, bytes, registered: true });
        }
        drop(tables);
        self.answer(API, scope, bytes, answer)
    }

    unsafe fn host_unregister(&self, addr: u64) -> Result<()> {
        const API: &str = "cuMemHostUnregister";
        let (scope, told) = self.enter_teardown(API)?;
        {
            let mut tables = self.lock();
            match tables.pinned.range(..=addr).next_back() {
                Some((&at, range)) if at == addr && range.registered => tables.pinned.remove(&addr),
                // The address lies inside a registered range, or in memory that the driver
                // allocated.
                Some((&at, range)) if addr < at + range.bytes => {
                    return Err(refuse(API, code::INVALID_VALUE));
                }
                _ if addr == 0 => return Err(refuse(API, code::INVALID_VALUE)),
                _ => return Err(refuse(API, code::HOST_MEMORY_NOT_REGISTERED)),
            };
        }
        told.and(self.answer(API, scope, 0, self.machine.host_unregister(addr)))
    }

    unsafe fn load_word(&self, addr: u64) -> u64 {
        self.machine.host_load(addr).unwrap_or_else(|error| no_word(addr, &error))
    }

    unsafe fn store_word(&self, addr: u64, value: u64) {
        if let Err(error) = self.machine.host_store(addr, value) {
            no_word(addr, &error);
        }
    }

    fn host_access(&self, addr: u64, bytes: u64, write: bool) {
        if write {
            self.machine.host_write(addr, bytes)
        } else {
            self.machine.host_read(addr, bytes)
        }
    }
}

/// Reports a breach of the contract: the address holds no word.
#[cold]
fn no_word(addr: u64, error: &Error) -> u64 {
    tracing::error!(%error, "no completion word at {addr:#x}");
    0
}
