//! The memory map: one address space for all devices, as with a vendor's unified addresses.
//!
//! Addresses, memory and access are separate. A *reservation* is a range of addresses. A *piece* is
//! memory of one device, a part of the store. A *region* is a piece (or a plain allocation) at an
//! address, with the devices that have access. Device addresses begin at [`DEVICE_BASE`], which no
//! host can dereference. Pinned and registered host memory keeps its own address.
//!
//! Memory has an identity beside its address: its place in the store. The race detector uses this
//! identity. So a piece that is mapped at two places is one memory, and a piece that is mapped
//! again keeps its record.
//!
//! This module must not know queues.

use super::os::{Pages, Store, Window, page_size};
use leasehold_core::{Error, OutOfMemory, Result};
use leasehold_hal::engine::shared_file::SharedFile;
use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::OwnedFd;

/// The most devices of a machine.
pub(super) const MOST_DEVICES: u32 = 1024;
/// The start of device addresses. The address is not canonical on any host, so a dereference
/// faults.
pub const DEVICE_BASE: u64 = 1 << 52;
/// The unit of pieces, reservations and mappings, in bytes.
pub const GRANULARITY: u64 = 2 << 20;
/// The minimum alignment of plain allocations, in bytes.
const ALLOC_ALIGN: u64 = 512;
/// A flag that separates identities in the store from host addresses.
pub(crate) const STORE: u64 = 1 << 60;

/// Names a piece of device memory without an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PieceId(pub u64);

/// The memory in use, for leak checks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryUse {
    /// Bytes in use of each device: allocations and pieces.
    pub device: Vec<u64>,
    /// Plain and stream-ordered allocations (count).
    pub allocations: u64,
    /// Pieces (count).
    pub pieces: u64,
    /// Mappings of pieces (count).
    pub mappings: u64,
    /// Reservations of addresses (count).
    pub reservations: u64,
    /// Bytes of pinned host memory.
    pub pinned: u64,
    /// Ranges of host memory that are registered (count).
    pub registered: u64,
}

impl MemoryUse {
    /// Returns whether no memory is in use.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.device.iter().all(|&b| b == 0)
            && *self == Self { device: self.device.clone(), ..Self::default() }
    }
}

/// Free ranges, first fit.
#[derive(Debug, Default)]
struct FreeRanges(BTreeMap<u64, u64>);

impl FreeRanges {
    fn new(bytes: u64) -> Self {
        Self(BTreeMap::from([(0, bytes)]))
    }

    fn take(&mut self, bytes: u64, align: u64) -> Option<u64> {
        let (from, end, at) = self.0.iter().find_map(|(&from, &end)| {
            let at = from.checked_next_multiple_of(align)?;
            (at.checked_add(bytes)? <= end).then_some((from, end, at))
        })?;
        self.0.remove(&from);
        if from < at {
            self.0.insert(from, at);
        }
        if at + bytes < end {
            self.0.insert(at + bytes, end);
        }
        Some(at)
    }

    fn give(&mut self, at: u64, bytes: u64) {
        let (mut from, mut end) = (at, at + bytes);
        if let Some((&before, &before_end)) = self.0.range(..at).next_back()
            && before_end == from
        {
            self.0.remove(&before);
            from = before;
        }
        if let Some(after_end) = self.0.remove(&end) {
            end = after_end;
        }
        self.0.insert(from, end);
    }
}

/// A set of devices.
#[derive(Debug, Clone, Copy, Default)]
struct Devices([u64; MOST_DEVICES as usize / 64]);

impl Devices {
    fn of(device: u32) -> Self {
        let mut set = Self::default();
        set.insert(device);
        set
    }

    fn contains(&self, device: u32) -> bool {
        self.0[device as usize / 64] >> (device % 64) & 1 != 0
    }

    /// Returns whether the device was not there.
    fn insert(&mut self, device: u32) -> bool {
        let new = !self.contains(device);
        self.0[device as usize / 64] |= 1 << (device % 64);
        new
    }

    /// Returns whether the device was there.
    fn remove(&mut self, device: u32) -> bool {
        let was = self.contains(device);
        self.0[device as usize / 64] &= !(1 << (device % 64));
        was
    }

    fn is_empty(&self) -> bool {
        self.0.iter().all(|bits| *bits == 0)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A plain or stream-ordered allocation, with its own addresses and memory.
    Allocation,
    /// A piece in a reservation.
    Mapping(PieceId),
}

/// Memory at an address.
#[derive(Debug)]
struct Region {
    bytes: u64,
    /// Never reused: distinguishes one use of an address from the next.
    id: u64,
    /// The place in the store.
    store: u64,
    owner: u32,
    kind: Kind,
    /// The devices with access.
    access: Devices,
}

#[derive(Debug)]
struct Piece {
    store: u64,
    bytes: u64,
    owner: u32,
    mappings: u32,
    /// The names that it has: one, and one more for each import of the same file. A piece without
    /// a name is freed with its last mapping.
    names: u32,
    /// The piece was never mapped.
    fresh: bool,
    /// The memory of a piece that other machines may map. `store` is its identity only.
    file: Option<SharedFile>,
    /// Whether it counts as memory of its device: another process's does not.
    counted: bool,
}

/// Host memory that devices can access.
#[derive(Debug)]
struct HostRange {
    bytes: u64,
    id: u64,
    /// The pages of allocated memory; `None` for registered memory.
    pages: Option<Pages>,
}

/// A contiguous part of an access within one memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AccessPart {
    /// The memory's identity.
    pub(crate) key: u64,
    pub(crate) bytes: u64,
    /// The region or host range; 0 for pageable host memory.
    pub(crate) region: u64,
    /// The address of the access.
    pub(crate) addr: u64,
}

/// The origin of an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AccessScope {
    /// A kernel on this device.
    Kernel(u32),
    /// A copy or fill, which can access all memory of the machine.
    Engine,
    /// A copy for which the caller vouches: any host memory too.
    Anywhere,
}

/// A freed memory.
#[derive(Debug)]
pub(crate) struct Gone {
    pub(crate) region: u64,
    pub(crate) key: u64,
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
    /// To be dropped after the lock is released.
    pub(crate) pages: Option<Pages>,
}

/// The memory of a machine.
pub(crate) struct Space {
    store: Store,
    window: Window,
    addresses: FreeRanges,
    memory: FreeRanges,
    page: u64,
    limit: u64,
    pinned_limit: u64,
    /// The fill of new memory.
    poison: Option<u8>,
    used: Vec<u64>,
    pinned: u64,
    reservations: BTreeMap<u64, u64>,
    regions: BTreeMap<u64, Region>,
    pieces: BTreeMap<PieceId, Piece>,
    host: BTreeMap<u64, HostRange>,
    /// `peers[a]` has the devices whose plain allocations device `a` can access.
    peers: Vec<Devices>,
    next_id: u64,
}

impl Space {
    pub(crate) fn new(
        devices: u32,
        limit: u64,
        pinned_limit: u64,
        poison: Option<u8>,
    ) -> Result<Self> {
        let all = limit.checked_mul(u64::from(devices)).filter(|&b| b <= 1 << 42);
        let all = all.ok_or_else(|| Error::invalid("more than 4 TiB of simulated memory"))?;
        // Reservations are many times larger than the pieces in them.
        let window = (all * 16 + (1 << 32)).next_multiple_of(GRANULARITY);
        Ok(Self {
            store: Store::new(window)?,
            window: Window::new(window)?,
            addresses: FreeRanges::new(window),
            memory: FreeRanges::new(window),
            page: page_size(),
            limit,
            pinned_limit,
            poison,
            used: vec![0; devices as usize],
            pinned: 0,
            reservations: BTreeMap::new(),
            regions: BTreeMap::new(),
            pieces: BTreeMap::new(),
            host: BTreeMap::new(),
            peers: (0..devices).map(Devices::of).collect(),
            next_id: 1,
        })
    }

    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id - 1
    }

    /// Counts bytes of a device as used.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub(super) fn charge(&mut self, device: u32, bytes: u64) -> Result<()> {
        let used = &mut self.used[device as usize];
        match used.checked_add(bytes).filter(|&sum| sum <= self.limit) {
            Some(sum) => {
                *used = sum;
                Ok(())
            }
            None => Err(OutOfMemory::new(format!("memory of simulated device {device}"), bytes)
                .note(format!("{used} of {} bytes are in use", self.limit))
                .into()),
        }
    }

    /// Ends a [`charge`](Self::charge).
    pub(super) fn give_back(&mut self, (device, bytes): (u32, u64)) {
        self.used[device as usize] -= bytes;
    }

    /// Bytes in use of a device, and its total bytes.
    pub(crate) fn device(&self, device: u32) -> (u64, u64) {
        (self.used[device as usize], self.limit)
    }

    pub(crate) fn in_use(&self) -> MemoryUse {
        let allocations =
            self.regions.values().filter(|r| r.kind == Kind::Allocation).count() as u64;
        MemoryUse {
            device: self.used.clone(),
            allocations,
            pieces: self.pieces.len() as u64,
            mappings: self.regions.len() as u64 - allocations,
            reservations: self.reservations.len() as u64,
            pinned: self.pinned,
            registered: self.host.values().filter(|h| h.pages.is_none()).count() as u64,
        }
    }

    pub(crate) fn enable_peer(&mut self, from: u32, to: u32) -> bool {
        self.peers[from as usize].insert(to)
    }

    pub(crate) fn disable_peer(&mut self, from: u32, to: u32) -> bool {
        from != to && self.peers[from as usize].remove(to)
    }

    pub(crate) fn alloc(&mut self, device: u32, bytes: u64) -> Result<u64> {
        if bytes == 0 {
            return Err(Error::invalid("an allocation of no bytes"));
        }
        let refused =
            || Error::from(OutOfMemory::new(format!("memory of simulated device {device}"), bytes));
        let span =
            bytes.checked_next_multiple_of(self.page.max(ALLOC_ALIGN)).ok_or_else(refused)?;
        self.charge(device, span)?;
        let align = if span >= GRANULARITY { GRANULARITY } else { self.page.max(ALLOC_ALIGN) };
        // A guard page between neighbours, so that an overrun does not hit the next allocation.
        let address = self.addresses.take(span + self.page, align);
        let store = self.memory.take(span, self.page);
        let (Some(at), Some(store)) = (address, store) else {
            address.into_iter().for_each(|a| self.addresses.give(a, span + self.page));
            store.into_iter().for_each(|s| self.memory.give(s, span));
            self.used[device as usize] -= span;
            return Err(refused());
        };
        if let Err(e) = self.window.map(at, self.store.file(), store, span) {
            self.addresses.give(at, span + self.page);
            self.memory.give(store, span);
            self.used[device as usize] -= span;
            return Err(e);
        }
        self.fill_new(at, span);
        let id = self.id();
        let region = Region {
            bytes: span,
            id,
            store,
            owner: device,
            kind: Kind::Allocation,
            access: Devices::default(),
        };
        self.regions.insert(DEVICE_BASE + at, region);
        Ok(DEVICE_BASE + at)
    }

    /// Fills new memory, which is mapped at an offset of the window.
    fn fill_new(&self, at: u64, bytes: u64) {
        if let Some(byte) = self.poison {
            // SAFETY: the memory was mapped just now, and no other code knows it.
            unsafe { std::ptr::write_bytes(self.window.host(at), byte, bytes as usize) };
        }
    }

    /// The device of a piece.
    pub(crate) fn piece_owner(&self, piece: PieceId) -> Option<u32> {
        self.pieces.get(&piece).map(|p| p.owner)
    }

    /// The allocation at `addr`, without freeing it.
    pub(crate) fn allocation(&self, addr: u64) -> Result<Gone> {
        match self.regions.get(&addr) {
            Some(r) if r.kind == Kind::Allocation => Ok(r.gone(addr)),
            _ => Err(Error::invalid(format!("{addr:#x} is no allocation of the simulated device"))),
        }
    }

    /// The device whose memory contains an address, for device memory.
    pub(crate) fn owner(&self, addr: u64) -> Option<u32> {
        let (&at, region) = self.regions.range(..=addr).next_back()?;
        (addr < at + region.bytes).then_some(region.owner)
    }

    pub(crate) fn free(&mut self, addr: u64) -> Result<Gone> {
        let gone = self.allocation(addr)?;
        let (at, store) = (addr - DEVICE_BASE, gone.key & !STORE);
        self.window.unmap(at, gone.bytes)?;
        if let Some(region) = self.regions.remove(&addr) {
            self.used[region.owner as usize] -= region.bytes;
        }
        self.store.discard(store, gone.bytes);
        self.memory.give(store, gone.bytes);
        self.addresses.give(at, gone.bytes + self.page);
        Ok(gone)
    }

    fn granular(what: &str, bytes: u64) -> Result<()> {
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
            return Err(Error::invalid(format!(
                "{what} {bytes:#x} is no multiple of {GRANULARITY:#x}"
            )));
        }
        Ok(())
    }

    pub(crate) fn reserve(&mut self, bytes: u64, align: u64) -> Result<u64> {
        Self::granular("a reservation of", bytes)?;
        if align != 0 && !align.is_power_of_two() {
            return Err(Error::invalid(format!("an alignment of {align}")));
        }
        let at = self.addresses.take(bytes, align.max(GRANULARITY)).ok_or_else(|| {
            Error::from(OutOfMemory::new("addresses of the simulated device", bytes))
        })?;
        self.reservations.insert(DEVICE_BASE + at, bytes);
        Ok(DEVICE_BASE + at)
    }

    pub(crate) fn release(&mut self, addr: u64, bytes: u64) -> Result<()> {
        if self.reservations.get(&addr) != Some(&bytes) {
            return Err(Error::invalid(format!(
                "{bytes:#x} bytes at {addr:#x} are no reservation"
            )));
        }
        if self.regions.range(addr..addr + bytes).next().is_some() {
            return Err(Error::invalid(format!(
                "something is still mapped in the reservation at {addr:#x}"
            )));
        }
        self.reservations.remove(&addr);
        self.addresses.give(addr - DEVICE_BASE, bytes);
        Ok(())
    }

    pub(crate) fn create(&mut self, device: u32, bytes: u64) -> Result<PieceId> {
        Self::granular("a piece of", bytes)?;
        self.charge(device, bytes)?;
        let Some(store) = self.memory.take(bytes, GRANULARITY) else {
            self.used[device as usize] -= bytes;
            return Err(
                OutOfMemory::new(format!("memory of simulated device {device}"), bytes).into()
            );
        };
        Ok(self.add_piece(device, store, bytes, None))
    }

    /// Adds a piece of this machine's memory, or of a file that another one has made.
    fn add_piece(
        &mut self,
        owner: u32,
        store: u64,
        bytes: u64,
        file: Option<SharedFile>,
    ) -> PieceId {
        let (id, own) = (PieceId(self.id()), file.is_none());
        let piece =
            Piece { store, bytes, owner, mappings: 0, names: 1, fresh: own, file, counted: own };
        self.pieces.insert(id, piece);
        id
    }

    /// A piece that other machines may map.
    pub(crate) fn create_shared(&mut self, device: u32, bytes: u64) -> Result<PieceId> {
        Self::granular("a piece of", bytes)?;
        let file = SharedFile::new(bytes)?;
        let id = self.create(device, bytes)?;
        self.pieces.entry(id).and_modify(|p| p.file = Some(file));
        Ok(id)
    }

    /// A descriptor of a shared piece.
    pub(crate) fn export(&self, piece: PieceId) -> Result<OwnedFd> {
        match self.pieces.get(&piece).filter(|p| p.names > 0).map(|p| &p.file) {
            Some(Some(file)) => file.descriptor(),
            Some(None) => Err(Error::invalid(format!("{piece:?} was not made to be shared"))),
            None => Err(Error::invalid(format!("{piece:?} does not exist"))),
        }
    }

    /// The piece of a descriptor: the same one, if this machine has the memory already.
    pub(crate) fn import(&mut self, device: u32, descriptor: OwnedFd) -> Result<PieceId> {
        let file = SharedFile::open(descriptor)?;
        let identity = file.identity();
        let known = self.pieces.iter_mut().find(|(_, p)| {
            p.file.as_ref().is_some_and(|f| identity.is_some() && f.identity() == identity)
        });
        if let Some((&id, piece)) = known {
            piece.names += 1;
            return Ok(id);
        }
        let bytes = file.bytes();
        Self::granular("shared memory of", bytes)?;
        let store = self.memory.take(bytes, GRANULARITY).ok_or_else(|| {
            Error::from(OutOfMemory::new("addresses of shared simulated memory", bytes))
        })?;
        Ok(self.add_piece(device, store, bytes, Some(file)))
    }

    /// Whether a range is one whole mapping of a shared piece.
    pub(crate) fn is_shared(&self, addr: u64, bytes: u64) -> bool {
        self.regions.get(&addr).is_some_and(|r| match r.kind {
            Kind::Mapping(piece) => {
                r.bytes == bytes && self.pieces.get(&piece).is_some_and(|p| p.file.is_some())
            }
            Kind::Allocation => false,
        })
    }

    /// Bytes of a piece.
    pub(crate) fn piece_bytes(&self, piece: PieceId) -> Option<u64> {
        self.pieces.get(&piece).map(|p| p.bytes)
    }

    /// Destroys a piece. As with a vendor's driver, its memory is freed when no mapping is left:
    /// now (returned) or with the last mapping (`None`).
    pub(crate) fn destroy(&mut self, piece: PieceId) -> Result<Option<Gone>> {
        let p = self.pieces.get_mut(&piece).filter(|p| p.names > 0);
        let p = p.ok_or_else(|| Error::invalid(format!("{piece:?} does not exist")))?;
        p.names -= 1;
        Ok(self.end_piece(piece))
    }

    /// Frees a destroyed piece without mappings.
    fn end_piece(&mut self, piece: PieceId) -> Option<Gone> {
        let p = self.pieces.get(&piece).filter(|p| p.names == 0 && p.mappings == 0)?;
        let gone = Gone { region: 0, key: STORE | p.store, addr: 0, bytes: p.bytes, pages: None };
        self.store.discard(p.store, p.bytes);
        self.memory.give(p.store, p.bytes);
        if p.counted {
            self.used[p.owner as usize] -= p.bytes;
        }
        self.pieces.remove(&piece);
        Some(gone)
    }

    pub(crate) fn map(&mut self, addr: u64, piece: PieceId) -> Result<()> {
        let p = self.pieces.get(&piece).filter(|p| p.names > 0);
        let p = p.ok_or_else(|| Error::invalid(format!("{piece:?} does not exist")))?;
        let (bytes, store, owner) = (p.bytes, p.store, p.owner);
        let (file, from) = match &p.file {
            Some(file) => (file.raw(), 0),
            None => (self.store.file(), store),
        };
        let end = addr
            .checked_add(bytes)
            .ok_or_else(|| Error::invalid("the mapping wraps the address space"))?;
        let inside =
            self.reservations.range(..=addr).next_back().is_some_and(|(&at, &len)| end <= at + len);
        if !inside || !addr.is_multiple_of(GRANULARITY) {
            return Err(Error::invalid(format!(
                "{bytes:#x} bytes at {addr:#x} do not lie in a reservation"
            )));
        }
        let before = self.regions.range(..end).next_back();
        if before.is_some_and(|(&at, r)| at + r.bytes > addr) {
            return Err(Error::invalid(format!("something is mapped at {addr:#x} already")));
        }
        self.window.map(addr - DEVICE_BASE, file, from, bytes)?;
        let id = self.id();
        self.regions.insert(
            addr,
            Region {
                bytes,
                id,
                store,
                owner,
                kind: Kind::Mapping(piece),
                access: Devices::default(),
            },
        );
        let fresh = self.pieces.get_mut(&piece).is_some_and(|p| {
            p.mappings += 1;
            std::mem::take(&mut p.fresh)
        });
        if fresh {
            self.fill_new(addr - DEVICE_BASE, bytes);
        }
        Ok(())
    }

    /// The whole mappings that cover a range without a gap.
    fn mappings(&self, addr: u64, bytes: u64) -> Result<Vec<u64>> {
        let refuse =
            || Error::invalid(format!("{bytes:#x} bytes at {addr:#x} are not whole mappings"));
        let end = addr.checked_add(bytes).ok_or_else(refuse)?;
        let (mut at, mut found) = (addr, Vec::new());
        while at < end {
            let r =
                self.regions.get(&at).filter(|r| r.kind != Kind::Allocation).ok_or_else(refuse)?;
            found.push(at);
            at += r.bytes;
        }
        if at != end || found.is_empty() {
            return Err(refuse());
        }
        Ok(found)
    }

    /// Gives a device access to mapped memory.
    pub(crate) fn set_access(&mut self, device: u32, addr: u64, bytes: u64) -> Result<()> {
        for at in self.mappings(addr, bytes)? {
            if let Some(region) = self.regions.get_mut(&at) {
                region.access.insert(device);
            }
        }
        Ok(())
    }

    /// The whole mappings of a range, before they are unmapped, and whether each is the only one of
    /// its memory.
    pub(crate) fn mapped(&self, addr: u64, bytes: u64) -> Result<Vec<(Gone, bool)>> {
        let mapped = |at: u64| {
            let region = &self.regions[&at];
            let alone = match region.kind {
                Kind::Mapping(piece) => self.pieces.get(&piece).is_none_or(|p| p.mappings == 1),
                _ => true,
            };
            (region.gone(at), alone)
        };
        Ok(self.mappings(addr, bytes)?.into_iter().map(mapped).collect())
    }

    /// Unmaps whole mappings. Returns the memories that were freed with them.
    pub(crate) fn unmap(&mut self, addr: u64, bytes: u64) -> Result<Vec<Gone>> {
        let found = self.mappings(addr, bytes)?;
        self.window.unmap(addr - DEVICE_BASE, bytes)?;
        let mut ended = Vec::new();
        for at in found {
            if let Some(Region { kind: Kind::Mapping(piece), .. }) = self.regions.remove(&at) {
                self.pieces.entry(piece).and_modify(|p| p.mappings -= 1);
                ended.extend(self.end_piece(piece));
            }
        }
        Ok(ended)
    }

    pub(crate) fn host_alloc(&mut self, bytes: u64) -> Result<u64> {
        if bytes == 0 {
            return Err(Error::invalid("an allocation of no bytes"));
        }
        if self.pinned.checked_add(bytes).is_none_or(|sum| sum > self.pinned_limit) {
            return Err(OutOfMemory::new("pinned host memory", bytes)
                .note(format!("{} of {} bytes are in use", self.pinned, self.pinned_limit))
                .into());
        }
        let align = if bytes >= GRANULARITY { GRANULARITY } else { self.page };
        let pages = Pages::new(bytes, align)?;
        let at = pages.at();
        let id = self.id();
        self.host.insert(at, HostRange { bytes, id, pages: Some(pages) });
        self.pinned += bytes;
        Ok(at)
    }

    pub(crate) fn host_free(&mut self, addr: u64) -> Result<Gone> {
        match self.host.get(&addr) {
            Some(h) if h.pages.is_some() => {}
            _ => {
                return Err(Error::invalid(format!(
                    "{addr:#x} is no pinned host memory of this machine"
                )));
            }
        }
        Ok(self.host_gone(addr))
    }

    pub(crate) fn host_register(&mut self, addr: u64, bytes: u64) -> Result<()> {
        let end = addr.checked_add(bytes).filter(|_| addr != 0 && bytes != 0 && addr < DEVICE_BASE);
        let end = end.ok_or_else(|| {
            Error::invalid(format!("{bytes} bytes at {addr:#x} are no host memory"))
        })?;
        if self.host.range(..end).next_back().is_some_and(|(&at, h)| at + h.bytes > addr) {
            return Err(Error::state(format!(
                "a part of the {bytes} bytes at {addr:#x} is registered already"
            )));
        }
        let id = self.id();
        self.host.insert(addr, HostRange { bytes, id, pages: None });
        Ok(())
    }

    pub(crate) fn host_unregister(&mut self, addr: u64) -> Result<Gone> {
        match self.host.get(&addr) {
            Some(h) if h.pages.is_none() => {}
            _ => return Err(Error::invalid(format!("{addr:#x} is not registered"))),
        }
        Ok(self.host_gone(addr))
    }

    fn host_gone(&mut self, addr: u64) -> Gone {
        let Some(h) = self.host.remove(&addr) else {
            return Gone { region: 0, key: addr, addr, bytes: 0, pages: None };
        };
        if h.pages.is_some() {
            self.pinned -= h.bytes;
        }
        Gone { region: h.id, key: addr, addr, bytes: h.bytes, pages: h.pages }
    }

    /// Returns whether the range is host memory that devices can access.
    pub(crate) fn is_pinned(&self, addr: u64, bytes: u64) -> bool {
        self.host
            .range(..=addr)
            .next_back()
            .is_some_and(|(&at, h)| addr.checked_add(bytes).is_some_and(|end| end <= at + h.bytes))
    }

    /// The host address for a device address, without a check.
    pub(crate) fn behind(&self, addr: u64) -> *mut u8 {
        if addr >= DEVICE_BASE { self.window.host(addr - DEVICE_BASE) } else { addr as *mut u8 }
    }

    /// The host address of `bytes` bytes at `addr`, if `who` has access to all of them. `parts`
    /// receives the memories that contain them.
    ///
    /// # Errors
    /// A device's error text: an illegal address.
    pub(crate) fn resolve(
        &self,
        who: AccessScope,
        addr: u64,
        bytes: u64,
        parts: &mut Vec<AccessPart>,
    ) -> Result<*mut u8, String> {
        let Some(end) = addr.checked_add(bytes) else {
            return Err(format!(
                "illegal address: {bytes} bytes at {addr:#x} wrap the address space"
            ));
        };
        if addr < DEVICE_BASE {
            return self.resolve_host(who, addr, bytes, parts);
        }
        let mut at = addr;
        while at < end {
            let found =
                self.regions.range(..=at).next_back().filter(|(from, r)| at < *from + r.bytes);
            let Some((&from, r)) = found else {
                return Err(format!(
                    "illegal address {at:#x}: nothing is mapped there ({bytes} bytes at {addr:#x})"
                ));
            };
            if !self.may_reach(who, r) {
                return Err(format!(
                    "illegal address {at:#x}: {who:?} has no access to memory of device {}",
                    r.owner
                ));
            }
            let to = end.min(from + r.bytes);
            parts.push(AccessPart {
                key: STORE | (r.store + (at - from)),
                bytes: to - at,
                region: r.id,
                addr: at,
            });
            at = to;
        }
        Ok(self.behind(addr))
    }

    fn may_reach(&self, who: AccessScope, r: &Region) -> bool {
        match (who, r.kind) {
            // No device reaches a mapping without access.
            (AccessScope::Engine | AccessScope::Anywhere, Kind::Mapping(_)) => !r.access.is_empty(),
            (AccessScope::Engine | AccessScope::Anywhere, Kind::Allocation) => true,
            (AccessScope::Kernel(device), Kind::Mapping(_)) => r.access.contains(device),
            (AccessScope::Kernel(device), Kind::Allocation) => {
                self.peers[device as usize].contains(r.owner)
            }
        }
    }

    fn resolve_host(
        &self,
        who: AccessScope,
        addr: u64,
        bytes: u64,
        parts: &mut Vec<AccessPart>,
    ) -> Result<*mut u8, String> {
        let range =
            self.host.range(..=addr).next_back().filter(|(at, h)| addr + bytes <= *at + h.bytes);
        let region = range.map_or(0, |(_, h)| h.id);
        if region == 0 && who != AccessScope::Anywhere && bytes != 0 {
            return Err(format!("illegal address {addr:#x}: pageable host memory ({bytes} bytes)"));
        }
        if addr == 0 && bytes != 0 {
            return Err(format!("illegal address: {bytes} bytes at the null address"));
        }
        if bytes != 0 {
            parts.push(AccessPart { key: addr, bytes, region, addr });
        }
        Ok(addr as *mut u8)
    }
}

impl Region {
    fn gone(&self, addr: u64) -> Gone {
        Gone { region: self.id, key: STORE | self.store, addr, bytes: self.bytes, pages: None }
    }
}

impl fmt::Debug for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Space").field(&self.in_use()).finish()
    }
}
