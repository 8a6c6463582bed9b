//! The C ABI over the simulated CUDA driver: the functions as programs call them, right and wrong,
//! and the header.

mod c_abi;
mod closing;
mod misuse;
mod plugin;
mod pools;
mod share;
mod streams;

use leasehold_capi::ffi::*;
use leasehold_capi_sim::*;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

pub(crate) const OK: c_int = 0;
pub(crate) const INVALID_ARGUMENT: c_int = 1;
pub(crate) const OUT_OF_MEMORY: c_int = 2;
pub(crate) const OVER_BUDGET: c_int = 3;
pub(crate) const UNAVAILABLE: c_int = 5;
pub(crate) const UNSUPPORTED: c_int = 6;
pub(crate) const INVALID_STATE: c_int = 7;
pub(crate) const SUSPENDED: c_int = 8;
pub(crate) const IN_USE: c_int = 9;
pub(crate) const MIB: usize = 1 << 20;

/// The text of this thread's last failure.
pub(crate) fn last_error() -> String {
    // SAFETY: the text lives until the thread's next failure.
    unsafe { CStr::from_ptr(leasehold_last_error()) }.to_string_lossy().into_owned()
}

/// Tests take turns: the simulated driver, its calls and its races are the process's.
pub(crate) fn turn() -> impl Drop {
    static TURN: OnceLock<leasehold_core::sync::Mutex<()>> = OnceLock::new();
    TURN.get_or_init(Default::default).lock()
}

/// A text that the library returned.
pub(crate) fn taken(text: *mut c_char) -> String {
    // SAFETY: the text is the library's own, freed once.
    unsafe {
        let copy = CStr::from_ptr(text).to_string_lossy().into_owned();
        leasehold_text_free(text);
        copy
    }
}

pub(crate) fn races() -> String {
    let mut text = null_mut();
    // SAFETY: the pointer is to a local.
    assert_eq!(unsafe { leasehold_sim_races(&mut text) }, OK);
    taken(text)
}

pub(crate) fn calls(name: &CStr) -> u64 {
    // SAFETY: the name is a C string.
    unsafe { leasehold_sim_calls(name.as_ptr()) }
}

/// An open device.
#[derive(Clone, Copy)]
pub(crate) struct Device(pub(crate) u64);

impl Device {
    pub(crate) fn open(name: &CStr, budget: u64, policy: u32) -> Result<Self, c_int> {
        let options = LeaseholdDeviceOptions {
            size: size_of::<LeaseholdDeviceOptions>(),
            budget,
            policy,
            trace_events: 0,
            flags: 0,
        };
        let mut device = 0;
        // SAFETY: the pointers are to locals.
        match unsafe { leasehold_device_open(name.as_ptr(), &options, &mut device) } {
            OK => Ok(Self(device)),
            status => Err(status),
        }
    }

    pub(crate) fn sim(budget: u64) -> Self {
        Self::open(c"sim-cuda:0", budget, 0).unwrap()
    }

    pub(crate) fn stream(self, kind: c_int) -> usize {
        let mut stream = 0;
        // SAFETY: the pointer is to a local.
        let made = unsafe { leasehold_sim_stream(self.0, kind, &mut stream) };
        assert_eq!(made, OK, "{}", last_error());
        stream
    }

    /// Ends and destroys a stream.
    pub(crate) fn end(self, stream: usize) {
        assert_eq!(leasehold_stream_end(self.0, stream), OK, "{}", last_error());
        assert_eq!(leasehold_sim_stream_destroy(self.0, stream), OK, "{}", last_error());
    }

    pub(crate) fn alloc(self, bytes: usize, stream: usize) -> Result<*mut c_void, c_int> {
        let mut block = null_mut();
        // SAFETY: the streams are the tests' own, and the pointer is to a local.
        match unsafe { leasehold_malloc(self.0, bytes, stream, &mut block) } {
            OK => Ok(block),
            status => Err(status),
        }
    }

    pub(crate) fn free(self, block: *mut c_void) -> c_int {
        // SAFETY: the simulated driver's race detector finds work that uses the block too late.
        unsafe { leasehold_free(self.0, block) }
    }

    pub(crate) fn record(self, block: *mut c_void, stream: usize) -> c_int {
        // SAFETY: the streams are the tests' own.
        unsafe { leasehold_record_stream(self.0, block, stream) }
    }

    pub(crate) fn fill(self, stream: usize, block: *mut c_void, byte: u8, bytes: usize) {
        assert_eq!(leasehold_sim_fill(self.0, stream, block, byte, bytes), OK, "{}", last_error());
    }

    pub(crate) fn read(self, stream: usize, block: *mut c_void, bytes: usize) -> Vec<u8> {
        let mut host = vec![0u8; bytes];
        // SAFETY: the vector has room.
        let status =
            unsafe { leasehold_sim_read(self.0, stream, host.as_mut_ptr().cast(), block, bytes) };
        assert_eq!(status, OK, "{}", last_error());
        host
    }

    pub(crate) fn stats(self) -> LeaseholdStats {
        let mut stats =
            LeaseholdStats { size: size_of::<LeaseholdStats>(), ..LeaseholdStats::default() };
        // SAFETY: the struct begins with its size.
        assert_eq!(unsafe { leasehold_stats_get(self.0, &mut stats) }, OK);
        stats
    }

    pub(crate) fn trim(self) -> u64 {
        let mut freed = 0;
        // SAFETY: the pointer is to a local.
        assert_eq!(unsafe { leasehold_trim(self.0, 0, &mut freed) }, OK, "{}", last_error());
        freed
    }

    pub(crate) fn synchronize(self) {
        assert_eq!(leasehold_device_synchronize(self.0), OK, "{}", last_error());
    }

    pub(crate) fn close(self) {
        assert_eq!(leasehold_device_close(self.0), OK, "{}", last_error());
    }

    pub(crate) fn snapshot(self) -> serde_json::Value {
        let mut text = null_mut();
        // SAFETY: the pointer is to a local.
        assert_eq!(unsafe { leasehold_snapshot(self.0, &mut text) }, OK);
        serde_json::from_str(&taken(text)).unwrap()
    }
}

/// A pool.
#[derive(Clone, Copy)]
pub(crate) struct Pool(pub(crate) u64);

impl Pool {
    pub(crate) fn new(device: Device, name: &str, flags: u32) -> Result<Self, c_int> {
        let name = CString::new(name).unwrap();
        let options = LeaseholdPoolOptions {
            size: size_of::<LeaseholdPoolOptions>(),
            name: name.as_ptr(),
            policy: 0,
            flags,
        };
        let mut pool = 0;
        // SAFETY: the pointers are to locals.
        match unsafe { leasehold_pool_create(device.0, &options, &mut pool) } {
            OK => Ok(Self(pool)),
            status => Err(status),
        }
    }

    pub(crate) fn alloc(self, bytes: usize, stream: usize) -> Result<*mut c_void, c_int> {
        let mut block = null_mut();
        // SAFETY: the streams are the tests' own, and the pointer is to a local.
        match unsafe { leasehold_pool_malloc(self.0, bytes, stream, &mut block) } {
            OK => Ok(block),
            status => Err(status),
        }
    }

    pub(crate) fn suspend(self, flags: u32) -> Result<u64, c_int> {
        let mut freed = 0;
        // SAFETY: the tests submit no work that uses the pool meanwhile.
        match unsafe { leasehold_pool_suspend(self.0, flags, &mut freed) } {
            OK => Ok(freed),
            status => Err(status),
        }
    }

    pub(crate) fn resume(self) -> c_int {
        leasehold_pool_resume(self.0)
    }

    /// The pool of a block.
    pub(crate) fn of(device: Device, block: *mut c_void) -> u64 {
        let mut pool = u64::MAX;
        // SAFETY: the pointer is to a local.
        let status =
            unsafe { leasehold_block_find(device.0, block, null_mut(), null_mut(), &mut pool) };
        assert_eq!(status, OK, "{}", last_error());
        pool
    }
}

/// A null block.
pub(crate) const NOTHING: *mut c_void = null_mut();

#[test]
fn a_device_tells_what_it_is() {
    let _turn = turn();
    let device = Device::sim(0);
    let mut info = LeaseholdDeviceInfo {
        size: size_of::<LeaseholdDeviceInfo>(),
        total_bytes: 0,
        free_bytes: 0,
        streams: 9,
        name: [0; 128],
    };
    // SAFETY: the struct begins with its size.
    assert_eq!(unsafe { leasehold_device_describe(device.0, &mut info) }, OK);
    assert_eq!((info.total_bytes, info.streams), (1 << 30, 0));
    // SAFETY: the last byte of the name is 0.
    let name = unsafe { CStr::from_ptr(info.name.as_ptr()) };
    assert_eq!(name, c"Simulated CUDA device 0");
    // A struct of an older header is filled as far as it goes.
    let mut short = LeaseholdDeviceInfo { size: 16, total_bytes: 1, free_bytes: 2, ..info };
    // SAFETY: the struct begins with its size.
    assert_eq!(unsafe { leasehold_device_describe(device.0, &mut short) }, OK);
    assert_eq!((short.size, short.total_bytes, short.free_bytes), (16, 1 << 30, 2));
    assert_eq!(leasehold_abi_version(), LEASEHOLD_ABI_VERSION);
    device.close();
}
