//! Tensor pool: dead tensors kept for reuse, by (elements, dtype, device).
//!
//! The pool knows addresses and keys. It must not read or destroy a tensor, and has no lock.
//! Callers get the tensors that leave it for ever, and destroy them outside their locks.

use rustc_hash::FxHashMap;
use std::fmt;

/// A tensor as compiled code sees it: an address. The tensor's destructor knows the type.
#[repr(C)]
pub struct OpaqueTensor {
    _opaque: [u8; 0],
    _neither_send_nor_sync: std::marker::PhantomData<(*mut u8, std::marker::PhantomPinned)>,
}

impl fmt::Debug for OpaqueTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OpaqueTensor")
    }
}

/// Destroys a tensor.
pub type TensorDestructor = unsafe extern "C" fn(*mut OpaqueTensor);

/// Element types, by the ids of the C ABI.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum ElementTypeId {
    /// 32-bit float.
    F32 = 0,
    /// 64-bit float.
    F64 = 1,
    /// 64-bit signed integer.
    I64 = 2,
    /// 32-bit unsigned integer.
    U32 = 3,
    /// 8-bit unsigned integer.
    U8 = 4,
    /// IEEE 754 half precision.
    F16 = 5,
    /// bfloat16.
    BF16 = 6,
}

impl ElementTypeId {
    /// The type with this id.
    pub const fn from_id(id: u8) -> Option<Self> {
        Some(match id {
            0 => Self::F32,
            1 => Self::F64,
            2 => Self::I64,
            3 => Self::U32,
            4 => Self::U8,
            5 => Self::F16,
            6 => Self::BF16,
            _ => return None,
        })
    }

    /// Bytes of one element.
    pub const fn size(self) -> u64 {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::U32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::U8 => 1,
        }
    }
}

/// Devices, by the ids of the C ABI.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum DeviceTypeId {
    /// Host memory.
    Cpu = 0,
    /// An NVIDIA device.
    Cuda = 1,
    /// An Apple device.
    Metal = 2,
}

impl DeviceTypeId {
    /// The device kind with this id.
    pub const fn from_id(id: u8) -> Option<Self> {
        Some(match id {
            0 => Self::Cpu,
            1 => Self::Cuda,
            2 => Self::Metal,
            _ => return None,
        })
    }
}

/// The properties that make two tensors interchangeable. Ids beyond [`ElementTypeId`] and
/// [`DeviceTypeId`] belong to the caller and are pooled like any other.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct TensorKey {
    /// Number of elements.
    pub num_elements: u64,
    /// The id of the element type, see [`ElementTypeId`].
    pub dtype: u8,
    /// The id of the device, see [`DeviceTypeId`].
    pub device: u8,
}

/// The assumed bytes of an element of a caller's type, for the pool's budget.
const UNKNOWN_ELEMENT: u64 = 8;

impl TensorKey {
    /// The key for ids of the C ABI; `None` for a size beyond the address space.
    pub fn from_ids(num_elements: u64, dtype: u8, device: u8) -> Option<Self> {
        let key = Self { num_elements, dtype, device };
        let bytes = num_elements.checked_mul(key.element())?;
        (bytes <= isize::MAX as u64).then_some(key)
    }

    fn element(self) -> u64 {
        ElementTypeId::from_id(self.dtype).map_or(UNKNOWN_ELEMENT, ElementTypeId::size)
    }

    /// Bytes of the elements; 8 for each element of a caller's type.
    pub fn bytes(self) -> u64 {
        self.num_elements.saturating_mul(self.element())
    }
}

/// The outcome of [`TensorPool::release`](crate::TensorPool::release).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "a tensor that was not pooled still belongs to the caller"]
pub enum PoolOutcome {
    /// The pool owns the tensor now.
    Pooled,
    /// The pool has no place or no memory for the tensor, which still belongs to the caller.
    Full,
    /// The pool has the tensor already, under this or another key; nothing changed.
    Duplicate,
}

/// The capacity of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolLimits {
    /// Tensors of one key.
    /// Default: 64.
    pub per_key: usize,
    /// Keys; the least recently used ones are removed first.
    /// Default: 256.
    pub keys: usize,
    /// Bytes over all keys; the least recently used keys are removed first.
    /// Default: 256 MiB.
    pub bytes: u64,
}

impl Default for PoolLimits {
    /// 64 tensors for each key, 256 keys, 256 MiB.
    fn default() -> Self {
        Self { per_key: 64, keys: 256, bytes: 256 << 20 }
    }
}

const NIL: usize = usize::MAX;

/// All tensors of one key; a node of the list from the most to the least recently used key.
#[derive(Debug)]
struct Bucket {
    key: TensorKey,
    tensors: Vec<*mut OpaqueTensor>,
    newer: usize,
    older: usize,
}

/// Dead tensors kept for reuse; see the module's documentation. It is empty when it is dropped, or
/// its tensors are lost.
#[derive(Debug)]
pub(crate) struct Pool {
    buckets: Vec<Bucket>,
    vacant: Vec<usize>,
    by_key: FxHashMap<TensorKey, usize>,
    by_address: FxHashMap<usize, usize>,
    newest: usize,
    oldest: usize,
    bytes: u64,
    limits: PoolLimits,
}

// SAFETY: the pool owns its tensors and only stores their addresses. The releaser of a tensor
// promises that any thread that holds the pool may destroy it.
unsafe impl Send for Pool {}

impl Pool {
    /// An empty pool.
    pub(crate) fn new(limits: PoolLimits) -> Self {
        Self {
            buckets: Vec::new(),
            vacant: Vec::new(),
            by_key: FxHashMap::default(),
            by_address: FxHashMap::default(),
            newest: NIL,
            oldest: NIL,
            bytes: 0,
            limits,
        }
    }

    /// Removes and returns the tensor of this key that was released last. `None` if the pool has
    /// none.
    pub(crate) fn acquire_key(&mut self, key: TensorKey) -> Option<*mut OpaqueTensor> {
        let &at = self.by_key.get(&key)?;
        self.touch(at);
        let tensor = self.buckets[at].tensors.pop()?;
        self.by_address.remove(&tensor.addr());
        self.bytes -= key.bytes();
        Some(tensor)
    }

    /// Gives a tensor to the pool. The caller then destroys the tensors that
    /// [`excess`](Self::excess) returns.
    pub(crate) fn release_key(&mut self, ptr: *mut OpaqueTensor, key: TensorKey) -> PoolOutcome {
        if ptr.is_null()
            || key.bytes() > self.limits.bytes
            || self.limits.per_key == 0
            || self.limits.keys == 0
        {
            return PoolOutcome::Full;
        }
        if self.by_address.contains_key(&ptr.addr()) {
            return PoolOutcome::Duplicate;
        }
        if self.by_address.try_reserve(1).is_err() {
            return PoolOutcome::Full;
        }
        let at = match self.by_key.get(&key) {
            Some(&at) => {
                self.touch(at);
                at
            }
            None => match self.add_bucket(key) {
                Some(at) => at,
                None => return PoolOutcome::Full,
            },
        };
        let bucket = &mut self.buckets[at].tensors;
        if bucket.len() >= self.limits.per_key || bucket.try_reserve(1).is_err() {
            return PoolOutcome::Full;
        }
        bucket.push(ptr);
        self.by_address.insert(ptr.addr(), at);
        self.bytes += key.bytes();
        PoolOutcome::Pooled
    }

    /// Removes and returns a tensor that exceeds the limits, of the least recently used key; `None`
    /// if the pool is within its limits.
    pub(crate) fn excess(&mut self) -> Option<(*mut OpaqueTensor, TensorKey)> {
        while self.by_key.len() > self.limits.keys {
            if let Some(tensor) = self.pop_oldest(true) {
                return Some(tensor);
            }
        }
        self.shrink(self.limits.bytes)
    }

    /// Removes and returns a tensor of the least recently used key while the pool has more than
    /// `bytes`. With 0: while it has any tensor (a tensor without elements has no bytes).
    pub(crate) fn shrink(&mut self, bytes: u64) -> Option<(*mut OpaqueTensor, TensorKey)> {
        while self.oldest != NIL && (self.bytes > bytes || bytes == 0) {
            if let Some(tensor) = self.pop_oldest(false) {
                return Some(tensor);
            }
        }
        None
    }

    /// Removes and returns a tensor, the first or the last, of the least recently used key. A key
    /// without tensors is removed.
    fn pop_oldest(&mut self, first: bool) -> Option<(*mut OpaqueTensor, TensorKey)> {
        let at = self.oldest;
        let bucket = &mut self.buckets[at];
        let key = bucket.key;
        let tensor = if first && !bucket.tensors.is_empty() {
            Some(bucket.tensors.remove(0))
        } else {
            bucket.tensors.pop()
        };
        if let Some(tensor) = tensor {
            self.bytes -= key.bytes();
            self.by_address.remove(&tensor.addr());
        }
        if self.buckets[at].tensors.is_empty() {
            self.remove_bucket(at);
        }
        tensor.map(|tensor| (tensor, key))
    }

    /// Removes this tensor and returns its key; `None` if the pool does not have it.
    pub(crate) fn take(&mut self, ptr: *mut OpaqueTensor) -> Option<TensorKey> {
        let at = self.by_address.remove(&ptr.addr())?;
        let bucket = &mut self.buckets[at];
        bucket.tensors.retain(|&t| t != ptr);
        self.bytes -= bucket.key.bytes();
        Some(bucket.key)
    }

    /// A place for a new key; `None` without memory.
    fn add_bucket(&mut self, key: TensorKey) -> Option<usize> {
        self.by_key.try_reserve(1).ok()?;
        let bucket = Bucket { key, tensors: Vec::new(), newer: NIL, older: NIL };
        let at = match self.vacant.pop() {
            Some(at) => {
                self.buckets[at] = bucket;
                at
            }
            None => {
                self.buckets.try_reserve(1).ok()?;
                // Every bucket may become vacant later, when no memory to record it may be
                // available.
                self.vacant.try_reserve(self.buckets.len() + 1).ok()?;
                self.buckets.push(bucket);
                self.buckets.len() - 1
            }
        };
        self.by_key.insert(key, at);
        self.link_newest(at);
        Some(at)
    }

    /// Removes a key without tensors.
    fn remove_bucket(&mut self, at: usize) {
        self.unlink(at);
        self.by_key.remove(&self.buckets[at].key);
        self.buckets[at].tensors = Vec::new();
        self.vacant.push(at);
    }

    fn touch(&mut self, at: usize) {
        if self.newest != at {
            self.unlink(at);
            self.link_newest(at);
        }
    }

    fn link_newest(&mut self, at: usize) {
        (self.buckets[at].newer, self.buckets[at].older) = (NIL, self.newest);
        match self.newest {
            NIL => self.oldest = at,
            before => self.buckets[before].newer = at,
        }
        self.newest = at;
    }

    fn unlink(&mut self, at: usize) {
        let (newer, older) = (self.buckets[at].newer, self.buckets[at].older);
        match newer {
            NIL => self.newest = older,
            n => self.buckets[n].older = older,
        }
        match older {
            NIL => self.oldest = newer,
            o => self.buckets[o].newer = newer,
        }
    }

    /// Number of tensors.
    pub(crate) fn total_count(&self) -> usize {
        self.by_address.len()
    }

    /// Bytes of all tensors' elements.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of keys that the pool remembers, with or without a tensor.
    pub(crate) fn key_count(&self) -> usize {
        self.by_key.len()
    }

    /// The limits in force.
    pub(crate) fn limits(&self) -> PoolLimits {
        self.limits
    }

    /// Sets new limits; they take effect with the next release or trim.
    pub(crate) fn set_limits(&mut self, limits: PoolLimits) {
        self.limits = limits;
    }
}
