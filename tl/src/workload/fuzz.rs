//! Fuzzer: arbitrary calls of the C ABI with arbitrary arguments.
//!
//! The fuzzer calls every function, in any order, with any number and with any address that its
//! contract admits: random ones, ones that were freed long ago, live ones of every kind.
//! Destructors and hooks call back. The end of each run checks the invariants. Sanitizers
//! (`ci/sanitize.sh`) detect crashes, aborts and leaks.

use std::cell::{Cell, RefCell};
use std::ffi::{c_char, c_void};
use std::ptr;

use super::program::Rng;
use super::{new_vector, push};
use crate::ffi::*;
use crate::{OpaqueTensor, Stats, TensorInfo};

/// Addresses that may be registered as tensors or with a destructor at any time: their destruction
/// does nothing.
const OBJECTS: usize = 64;
static OBJECT_BYTES: [[u64; 4]; OBJECTS] = [[0; 4]; OBJECTS];

thread_local! {
    static CALLBACKS: Cell<(u64, u32)> = const { Cell::new((0, 0)) };
    /// Recently made structs, dead or alive, for use as arguments.
    static STRUCTS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The result of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Summary {
    /// Calls made, including those of callbacks.
    pub calls: u64,
    /// Misuses that the manager counted meanwhile, over all threads.
    pub misuses: u64,
}

fn object(rng: &mut Rng) -> *mut c_void {
    let i = rng.below(OBJECTS as u64) as usize;
    ptr::from_ref(&OBJECT_BYTES[i]).cast_mut().cast()
}

/// The number of addresses without memory, aligned and not; the last one is the highest possible
/// address.
const STRANGE: u64 = 4096;

fn nowhere(i: u64) -> *mut c_void {
    ptr::without_provenance_mut(if i + 1 == STRANGE {
        usize::MAX
    } else {
        0x0013_5700_0000_0000 + 37 * i as usize
    })
}

/// Any address, for functions that read only known addresses.
fn any_address(rng: &mut Rng) -> *mut c_void {
    let recent = |rng: &mut Rng| {
        STRUCTS.with_borrow(|s| s.get(rng.below(s.len() as u64) as usize).copied().unwrap_or(0))
    };
    match rng.below(8) {
        0 => ptr::null_mut(),
        1 => nowhere(rng.below(STRANGE)),
        2 => ptr::without_provenance_mut(rng.below(64) as usize),
        3 | 4 => ptr::with_exposed_provenance_mut(recent(rng)),
        _ => object(rng),
    }
}

fn any_number(rng: &mut Rng) -> i64 {
    match rng.below(16) {
        0 => rng.next_u64() as i64,
        1 => [i64::MIN, i64::MAX, -1, 1 << 32, i64::from(i32::MIN), 1 << 47][rng.below(6) as usize],
        2 => rng.below(1 << 20) as i64,
        _ => rng.below(40) as i64 - 2,
    }
}

fn any_name(rng: &mut Rng) -> *const c_char {
    const NAMES: [&[u8]; 5] = [b"Node\0", b"\0", b"List\0", b"\xff\xfe\0", &[b'x'; 300]];
    if rng.one_in(6) { ptr::null() } else { NAMES[rng.below(5) as usize].as_ptr().cast() }
}

/// Makes some calls from within a callback, up to a maximum depth.
fn call_back() {
    let (seed, depth) = CALLBACKS.get();
    if depth < 3 && seed != 0 {
        let mut rng = Rng(seed);
        for _ in 0..rng.below(4) {
            CALLBACKS.set((rng.next_u64() | 1, depth + 1));
            call(&mut rng);
        }
        CALLBACKS.set((rng.next_u64() | 1, depth));
    }
}

unsafe extern "C" fn destroy(_: *mut c_void) {
    call_back();
}

unsafe extern "C" fn destroy_tensor(_: *mut OpaqueTensor) {
    call_back();
}

unsafe extern "C" fn describe(tensor: *const OpaqueTensor, info: *mut TensorInfo) -> i32 {
    let mut rng = Rng(tensor.addr() as u64);
    // SAFETY: the manager passes a struct to fill in.
    unsafe {
        *info = TensorInfo {
            num_elements: [rng.below(4), rng.below(1 << 20)][rng.below(2) as usize],
            dtype_id: rng.below(9) as u8,
            device_id: rng.below(4) as u8,
        }
    };
    (rng.below(4) != 0).into()
}

extern "C" fn enter_hook() -> u64 {
    call_back();
    7
}

extern "C" fn exit_hook(value: u64) {
    assert_eq!(value, 7, "a scope hook got a value that is not its own");
    call_back();
}

/// Registers a new struct, and keeps its address for later calls.
fn make_struct(rng: &mut Rng) {
    // SAFETY: a new block that only the manager frees.
    let fresh = unsafe { libc::malloc(1 + rng.below(64) as usize) };
    let forgotten = STRUCTS.with_borrow_mut(|s| {
        s.push(fresh.expose_provenance());
        (s.len() > 128).then(|| s.swap_remove(rng.below(64) as usize))
    });
    if let Some(addr) = forgotten {
        drop_count(addr);
    }
    // SAFETY: the block is new, from `malloc`. Names are C strings or long enough.
    unsafe {
        match rng.below(3) {
            0 => tl_mem_register_struct(fresh),
            1 => tl_mem_register_struct_named(fresh, any_name(rng)),
            _ => tl_mem_register_struct_sized(fresh, any_name(rng), any_number(rng)),
        }
    }
}

/// One arbitrary call.
fn call(rng: &mut Rng) {
    let mut text = [0 as c_char; 64];
    match rng.below(64) {
        0..8 => tl_mem_enter_scope(),
        8..16 => tl_mem_exit_scope(),
        16..19 => tl_mem_function_enter(any_number(rng)),
        19..22 => tl_mem_function_exit(),
        22..26 => {
            let (slot, size) = (any_number(rng), any_number(rng));
            let buffer = tl_mem_get_buffer(slot, size);
            if !buffer.is_null() {
                // SAFETY: the manager promises `size` bytes; writes at both ends suffice.
                unsafe {
                    if size > 0 {
                        *buffer.cast::<u8>() = 1;
                        *buffer.cast::<u8>().add(size as usize - 1) = 2;
                    }
                }
            }
        }
        26..30 => make_struct(rng),
        // SAFETY: the destruction of these objects does nothing and may be repeated.
        30..34 => unsafe { tl_mem_register_tensor(object(rng).cast()) },
        // SAFETY: the destruction of these objects does nothing and may be repeated.
        34..37 => unsafe {
            tl_mem_register_custom(object(rng), (!rng.one_in(9)).then_some(destroy))
        },
        37 | 38 => {
            let vec = new_vector();
            for _ in 0..rng.below(5) {
                let element = any_address(rng);
                tl_ptr_acquire(element);
                // SAFETY: a new vector.
                unsafe { push(vec, element) };
            }
            STRUCTS.with_borrow_mut(|s| s.push(vec.expose_provenance()));
            // SAFETY: a new vector from the C allocator.
            unsafe { tl_mem_register_vec_ptr(vec.cast()) };
        }
        39 => tl_mem_register_ptr(any_address(rng)),
        40 => tl_mem_unregister(any_address(rng)),
        41 => tl_mem_promote(any_address(rng)),
        42 => _ = tl_mem_is_registered(any_address(rng)),
        43 | 44 => tl_ptr_acquire(any_address(rng)),
        45 | 46 => tl_ptr_release(any_address(rng)),
        47 => tl_tensor_acquire(any_address(rng).cast()),
        48 => tl_tensor_release(any_address(rng).cast()),
        49 => tl_ptr_inc_ref(any_address(rng)),
        // Only for objects that need not be freed after a `true`.
        50 => _ = tl_ptr_dec_ref(object(rng)),
        51 => _ = tl_ptr_release_bool(any_address(rng)),
        52 => tl_mem_unwind(if rng.one_in(2) { tl_mem_mark() } else { any_number(rng) }),
        53 => match rng.below(32) {
            0 => tl_mem_set_scope_hooks(Some(enter_hook), Some(exit_hook)),
            1 => tl_mem_set_scope_hooks(None, rng.one_in(2).then_some(exit_hook)),
            // SAFETY: the hooks accept every tensor.
            2 => unsafe { tl_mem_set_tensor_describer(rng.one_in(2).then_some(describe)) },
            _ => _ = tl_get_object_count(),
        },
        55 => match rng.below(64) {
            0 => _ = tl_pool_trim(any_number(rng)),
            // SAFETY: the buffer has that many bytes, or is null.
            1 => _ = unsafe { tl_mem_leak_report(text.as_mut_ptr(), rng.below(64) as usize) },
            2 => {
                let mut stats =
                    Stats { size: rng.below(2 * size_of::<Stats>() as u64), ..Stats::default() };
                let room = stats.size <= size_of::<Stats>() as u64;
                // SAFETY: the struct has room for `size` bytes.
                _ = unsafe { tl_mem_stats(if room { &raw mut stats } else { ptr::null_mut() }) };
            }
            3 => _ = tl_get_object_count() + tl_get_refcount_count() + tl_get_pool_count(),
            // SAFETY: the text has room for 64 bytes.
            _ => _ = unsafe { tl_mem_last_error(text.as_mut_ptr(), rng.below(64) as usize) },
        },
        54 | 56..60 => {
            let elements = [rng.below(4) as i64, any_number(rng)][rng.below(2) as usize];
            let tensor = tl_pool_acquire(elements, rng.below(9) as u8, rng.below(4) as u8);
            // SAFETY: null, or one of the objects whose destruction does nothing.
            unsafe { tl_mem_register_tensor(tensor) };
        }
        60 => {
            let tensor = any_address(rng).cast();
            tl_tensor_acquire(tensor);
            tl_tensor_release(tensor);
        }
        61 => _ = tl_mem_misuses(any_number(rng) as i32),
        _ => _ = tl_get_scope_depth(),
    }
}

/// Makes about `calls` calls from `seed` on the calling thread, which must be at rest. Then cleans
/// up and checks the invariants.
///
/// # Panics
/// If an invariant is violated, which is the purpose of the function.
pub fn fuzz(seed: u64, calls: u64) -> Summary {
    let mut rng = Rng(seed);
    let start = tl_mem_mark();
    // SAFETY: the hooks accept every tensor.
    unsafe {
        tl_mem_set_tensor_destructor(Some(destroy_tensor));
        tl_mem_set_tensor_describer(Some(describe));
    }
    let mut made = 0;
    while made < calls {
        CALLBACKS.set((rng.next_u64() | 1, 0));
        // Mostly short programs, which return to rest as real programs do.
        let length = 1 + rng.below(400);
        for _ in 0..length {
            call(&mut rng);
        }
        made += length;
        if !rng.one_in(3) {
            tl_mem_unwind(start);
            assert_eq!(
                tl_get_scope_depth(),
                start & 0xFFFF_FFFF,
                "unwinding to the start restores the depth"
            );
        }
        let known = STRUCTS.with_borrow(Vec::len);
        if known > 512 {
            drop_counts();
        }
    }
    CALLBACKS.set((0, 0));
    tl_mem_set_scope_hooks(None, None);
    tl_mem_unwind(start);
    assert_eq!(tl_get_scope_depth(), start & 0xFFFF_FFFF, "the depth is back at the start");
    drop_counts();
    let mut stats = Stats::default();
    // SAFETY: the struct has the size that it states.
    unsafe { tl_mem_stats(&raw mut stats) };
    Summary { calls: made, misuses: stats.total_misuses() }
}

/// Releases the remaining counts on structs, tensors and vectors of this thread.
fn drop_counts() {
    STRUCTS.take().into_iter().for_each(drop_count);
}

fn drop_count(addr: usize) {
    while tl_ptr_release_bool(ptr::with_exposed_provenance_mut(addr)) == 1 {}
}

/// Releases the remaining counts on addresses that all threads use; afterwards no object may be
/// alive. Must be called when no other thread fuzzes and no other test uses the C ABI.
///
/// # Panics
/// If an object is still alive.
pub fn finish() {
    CALLBACKS.set((0, 0));
    for block in &OBJECT_BYTES {
        while tl_ptr_release_bool(ptr::from_ref(block).cast_mut().cast()) == 1 {}
    }
    for address in (0..64).map(ptr::without_provenance_mut).chain((0..STRANGE).map(nowhere)) {
        while tl_ptr_release_bool(address) == 1 {}
    }
    let mut stats = Stats::default();
    // SAFETY: the struct has the size that it says.
    unsafe { tl_mem_stats(&raw mut stats) };
    assert_eq!(
        (stats.slot_bytes, stats.deferred_bytes),
        (0, 0),
        "buffers were kept beyond their frames"
    );
    // Structs of one thread that another's list of arguments held have been released by their
    // addresses on both.
    assert_eq!(stats.live_objects, 0, "something is still alive");
}
