//! NCCL, NVIDIA's library of collectives between its GPUs.
//!
//! The library is loaded at the first communicator: from the path in `LEASEHOLD_NCCL`, else as
//! `libnccl.so.2`, where the system's loader looks. Only functions that versions from 2.19 on have
//! are used. Communicators are blocking: a call returns when its work is on the stream. (In
//! NCCL's other mode a group starts a thread, and returns before that.)
//!
//! # What the library's environment must say
//! NCCL reads it once, when it is loaded. Nothing here changes a process's environment, which other
//! threads may read.
//! - `NCCL_GRAPH_REGISTER=0`, for calls in recordings. Otherwise the library registers the memory
//!   of captured calls, and memory that may move cannot be registered. Such a call is refused.
//! - `NCCL_RUNTIME_CONNECT=0` makes all connections with the communicator. Without it the first
//!   call of a kind waits for the other ranks on the host.
//!
//! # Why this is safe
//! A communicator is taken out of its place before the library ends it, so it ends once, and no
//! later call finds it. An abort may come beside a call: the library allows it, from another
//! thread, and the call returns. The layer above destroys a communicator after its last call and
//! its last graph. An abort may come before: then the layer above launches no graph with its calls
//! any more, and the library keeps the memory that they use until the last one is destroyed.

use super::ops::{Call, CollectiveOps, Communicator, Place};
use super::window::WindowFunctions;
use crate::element::{ElementType, Reduce};
use crate::error::{unavailable, unsupported};
use crate::signature::Kind;
use leasehold::backend::sync::{Arc, Condvar, Mutex, OnceLock, thread};
use leasehold::backend::{BackendKind, Binding};
use leasehold::{Error, Result, View};
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::time::{Duration, Instant};

/// The library's file, as the system's loader knows it.
const FILE: &str = "libnccl.so.2";
/// The variable that names another file.
const PATH: &str = "LEASEHOLD_NCCL";
/// The oldest version: 2.19.0, the first one with `ncclCommSplit` and stable captures.
const OLDEST: c_int = 21_900;

/// The most ranks between which all connections of sends and receives are made at the beginning.
const CONNECTED: u32 = 64;

/// How long the end of a process waits for the library.
const EXIT: Duration = Duration::from_secs(2);

/// The calls that end communicators, on threads that the end of a process does not wait for. The
/// library and the driver take their state down as the process ends, and such a call would find
/// it gone.
struct Ending {
    calls: usize,
    exiting: bool,
}

static ENDING: (Mutex<Ending>, Condvar) =
    (Mutex::new(Ending { calls: 0, exiting: false }), Condvar::new());

/// Makes a call, unless the process ends.
fn unless_exiting<T>(call: impl FnOnce() -> T) -> Option<T> {
    let (ending, changed) = &ENDING;
    {
        let mut ending = ending.lock();
        if ending.exiting {
            return None;
        }
        ending.calls += 1;
    }
    let made = call();
    ending.lock().calls -= 1;
    changed.notify_all();
    Some(made)
}

/// Runs as the process ends, before the library's own destructors: it was registered after them.
extern "C" fn at_exit() {
    let until = Instant::now() + EXIT;
    let (ending, changed) = &ENDING;
    let mut ending = ending.lock();
    ending.exiting = true;
    while ending.calls != 0 && !changed.wait_until(&mut ending, until).timed_out() {}
}

unsafe extern "C" {
    fn atexit(function: extern "C" fn()) -> c_int;
}

/// `ncclUniqueId`, which the library takes by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Id([u8; 128]);

impl Id {
    /// The id of these bytes.
    pub(super) fn of(bytes: &[u8]) -> Result<Self> {
        <[u8; 128]>::try_from(bytes)
            .map(Self)
            .map_err(|_| Error::invalid(format!("an id of {} bytes is not NCCL's", bytes.len())))
    }
}

pub(super) type RawComm = *mut c_void;
type Code = c_int;

/// Declares the functions that are used, with their communicators and arguments.
macro_rules! functions {
    ($($name:ident = $symbol:literal [$of:expr] ($($argument:ident: $type:ty),*);)*) => {
        pub(super) struct Functions {
            $($name: unsafe extern "C" fn($($type),*) -> Code,)*
            error_string: unsafe extern "C" fn(Code) -> *const c_char,
            last_error: unsafe extern "C" fn(RawComm) -> *const c_char,
        }

        #[expect(clippy::too_many_arguments, reason = "the library's functions")]
        impl Functions {
            /// # Safety
            /// - The library is NCCL.
            unsafe fn of(library: &Library) -> std::result::Result<Self, libloading::Error> {
                // SAFETY: the types are those of the library's header.
                unsafe {
                    Ok(Self {
                        $($name: *library.get(concat!($symbol, "\0").as_bytes())?,)*
                        error_string: *library.get(b"ncclGetErrorString\0")?,
                        last_error: *library.get(b"ncclGetLastError\0")?,
                    })
                }
            }

            $(
                /// # Safety
                /// - As the library's function needs it.
                pub(super) unsafe fn $name(&self, $($argument: $type),*) -> Result<()> {
                    // SAFETY: by the contract.
                    self.said($symbol, unsafe { (self.$name)($($argument),*) }, $of)
                }
            )*
        }
    };
}

/// An address of the device, and a native stream.
type Word = *mut c_void;

/// No communicator.
const NONE: RawComm = std::ptr::null_mut();

functions! {
    version = "ncclGetVersion" [NONE] (at: *mut c_int);
    unique_id = "ncclGetUniqueId" [NONE] (at: *mut Id);
    init = "ncclCommInitRank" [NONE] (at: *mut RawComm, size: c_int, id: Id, rank: c_int);
    async_error = "ncclCommGetAsyncError" [comm] (comm: RawComm, at: *mut Code);
    abort = "ncclCommAbort" [NONE] (comm: RawComm);
    destroy = "ncclCommDestroy" [NONE] (comm: RawComm);
    group_start = "ncclGroupStart" [NONE] ();
    group_end = "ncclGroupEnd" [NONE] ();
    all_reduce = "ncclAllReduce" [comm]
        (src: Word, dst: Word, n: usize, of: c_int, how: c_int, comm: RawComm, stream: Word);
    broadcast = "ncclBroadcast" [comm]
        (src: Word, dst: Word, n: usize, of: c_int, root: c_int, comm: RawComm, stream: Word);
    reduce = "ncclReduce" [comm]
        (src: Word, dst: Word, n: usize, of: c_int, how: c_int, root: c_int, comm: RawComm, stream: Word);
    all_gather = "ncclAllGather" [comm]
        (src: Word, dst: Word, n: usize, of: c_int, comm: RawComm, stream: Word);
    reduce_scatter = "ncclReduceScatter" [comm]
        (src: Word, dst: Word, n: usize, of: c_int, how: c_int, comm: RawComm, stream: Word);
    send = "ncclSend" [comm] (src: Word, n: usize, of: c_int, to: c_int, comm: RawComm, stream: Word);
    recv = "ncclRecv" [comm] (dst: Word, n: usize, of: c_int, from: c_int, comm: RawComm, stream: Word);
}

impl Functions {
    /// The error of a function's code.
    pub(super) fn said(&self, api: &'static str, code: Code, comm: RawComm) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the library has texts for all codes; a communicator may be null.
        let texts = unsafe { [(self.error_string)(code), (self.last_error)(comm)] };
        // SAFETY: a text ends with a zero.
        let text = |text| unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned();
        let mut texts: Vec<String> =
            texts.into_iter().filter(|text| !text.is_null()).map(text).collect();
        texts.retain(|text| !text.is_empty());
        Err(Error::Driver { api, code, name: texts.join(": ").into() })
    }
}

/// The library, once it is loaded. It stays loaded.
pub(super) struct Api {
    pub(super) functions: Functions,
    name: String,
    /// Whether captured calls leave memory alone.
    captures: bool,
    /// `None` before 2.27.
    windows: Option<WindowFunctions>,
    _library: Library,
}

impl Api {
    fn load() -> Result<Self> {
        let path = std::env::var_os(PATH);
        let file = path.clone().unwrap_or_else(|| FILE.into());
        let shown = file.to_string_lossy().into_owned();
        let missing = |why: libloading::Error| {
            let why = why.to_string();
            let why: String = why.chars().filter(|c| !c.is_control()).take(300).collect();
            unavailable(format!(
                "NCCL cannot be loaded from {shown} ({why}); install NVIDIA's NCCL, or give the path of libnccl.so.2 in {PATH}"
            ))
        };
        // SAFETY: the library's initialisers do not use this program's state. The user who names
        // another file vouches for it.
        let library = unsafe { Library::new(&file) }.map_err(missing)?;
        // SAFETY: the file is NCCL, as above.
        let functions = unsafe { Functions::of(&library) }.map_err(missing)?;
        let mut version = 0;
        // SAFETY: the argument is a place for a number.
        let known = unsafe { functions.version(&raw mut version) };
        if known.is_err() || version < OLDEST {
            return Err(unavailable(format!(
                "{shown} has version {version}; NCCL 2.19 or newer is needed"
            )));
        }
        let name = format!("NCCL {}.{}.{}", version / 10_000, version / 100 % 100, version % 100);
        // SAFETY: the function does not unwind: it takes a lock and waits. Without room for it the
        // end of a process may meet a call of the library, as it would without this.
        unsafe { atexit(at_exit) };
        let captures = std::env::var_os("NCCL_GRAPH_REGISTER").is_some_and(|v| v == "0");
        // SAFETY: the file is NCCL, as above.
        let windows = unsafe { WindowFunctions::of(&library) };
        Ok(Self { functions, name, captures, windows, _library: library })
    }
}

/// NCCL, for ranks with a GPU of NVIDIA's each.
#[derive(Clone)]
pub struct Nccl(pub(super) &'static Api);

static API: OnceLock<Result<Api>> = OnceLock::new();

impl Nccl {
    /// The library of this machine. The first call loads it.
    ///
    /// # Errors
    /// `Unavailable` without the library, or for a version before 2.19.
    pub fn load() -> Result<Self> {
        match API.get_or_init(Api::load) {
            Ok(api) => Ok(Self(api)),
            Err(error) => Err(error.clone()),
        }
    }
}

impl std::fmt::Debug for Nccl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Nccl").field(&self.0.name).finish()
    }
}

impl CollectiveOps for Nccl {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn unique_id(&self) -> Result<Vec<u8>> {
        let mut id = Id([0; 128]);
        // SAFETY: the argument is a place for an id.
        unsafe { self.0.functions.unique_id(&raw mut id) }?;
        Ok(id.0.to_vec())
    }

    fn init(&self, place: &Place) -> Result<Arc<dyn Communicator>> {
        let device = place.runtime.device();
        if device.backend != BackendKind::Cuda
            || !place.runtime.raw_device().caps().vendor_libraries
        {
            return Err(unsupported(format!(
                "{device} is no GPU of NVIDIA's; NCCL is for real cuda devices"
            )));
        }
        let id = Id::of(&place.id)?;
        let mut comm: RawComm = std::ptr::null_mut();
        let (size, rank) = (place.size as c_int, place.rank as c_int);
        // SAFETY: the place is for a communicator, and the device is the driver's current one.
        unsafe { self.0.functions.init(&raw mut comm, size, id, rank) }?;
        let state =
            Mutex::new(State { comm: Some(Raw(comm)), cause: None, captured: false, inside: 0 });
        let part = Arc::new(Part { api: self.0, size: place.size, rank: place.rank, state });
        Part::connect(&part, place)?;
        Ok(part)
    }
}

/// The pointer of a communicator.
#[derive(Clone, Copy)]
struct Raw(RawComm);

// SAFETY: the library takes a communicator from any thread, one call at a time: the layer above has
// the turn.
unsafe impl Send for Raw {}

/// A rank's part.
struct Part {
    api: &'static Api,
    size: u32,
    rank: u32,
    state: Mutex<State>,
}

struct State {
    /// `None` once it was aborted or destroyed.
    comm: Option<Raw>,
    /// Why it was aborted.
    cause: Option<Error>,
    /// Whether graphs have its calls, and so use its memory on the device.
    captured: bool,
    /// Calls that go into the library, or are in it.
    inside: u32,
}

impl State {
    fn comm(&self) -> Result<RawComm> {
        match (&self.cause, self.comm) {
            (Some(cause), _) => Err(cause.clone()),
            (None, Some(Raw(comm))) => Ok(comm),
            (None, None) => Err(Error::state("the communicator was given back")),
        }
    }
}

impl Part {
    /// Makes the connections of sends and receives: each rank exchanges a byte with each other one.
    /// The library would make them at the first call, and cannot in one that is recorded.
    fn connect(part: &Arc<Self>, place: &Place) -> Result<()> {
        if part.size > CONNECTED || !place.sends {
            return Ok(());
        }
        let stream = place.runtime.create_stream()?;
        let bytes = place.runtime.alloc(2 * u64::from(part.size))?.unlisted()?;
        let own = part.clone();
        // SAFETY: the call uses its operand's bytes only, on the stream that it is given.
        unsafe {
            stream.foreign_call("connect", &[bytes.read_write()], move |word, bound| {
                own.exchange(word as usize as *mut c_void, bound[0].addr as usize as *mut u8)
            })
        }?;
        stream.synchronize()
    }

    /// Sends a byte to each other rank, and receives one, at `at`.
    ///
    /// # Safety
    /// - `stream` is a native stream of the device, and work on it may use two bytes for each rank
    ///   from `at` on.
    unsafe fn exchange(&self, stream: *mut c_void, at: *mut u8) -> Result<()> {
        let (f, size) = (&self.api.functions, self.size as usize);
        let comm = self.state.lock().comm()?;
        // SAFETY: the caller vouches for stream and memory; the communicator lives. A group that
        // began ends, also after an error.
        unsafe {
            f.group_start()?;
            let made = (0..size).filter(|&peer| peer != self.rank as usize).try_for_each(|peer| {
                let (from, to) = (at.wrapping_add(peer), at.wrapping_add(size + peer));
                f.send(from.cast(), 1, BYTE, peer as c_int, comm, stream)?;
                f.recv(to.cast(), 1, BYTE, peer as c_int, comm, stream)
            });
            let ended = f.group_end();
            made.and(ended)
        }
    }

    /// Enqueues a call. An all_to_all is sends and receives of the group around it.
    ///
    /// # Safety
    /// - The conditions of [`Communicator::enqueue`].
    unsafe fn call(&self, comm: RawComm, stream: *mut c_void, call: &Call<'_>) -> Result<()> {
        let (f, s) = (&self.api.functions, call.signature);
        if s.captured && !self.api.captures {
            return Err(unsupported(
                "NCCL registers the memory of recorded calls unless NCCL_GRAPH_REGISTER=0 is set; set it before the program starts",
            ));
        }
        let at =
            |b: Option<Binding>| b.map_or(std::ptr::null_mut(), |b| b.addr as usize as *mut c_void);
        let (src, dst) = (at(call.src), at(call.dst));
        let (count, element) = words(s.element, s.count, s.kind)?;
        // SAFETY: the caller vouches for the memory, which has as many elements as the call needs,
        // and for the stream. The communicator lives, or an abort beside this call
        // ends it, which the library allows.
        unsafe {
            match s.kind {
                Kind::AllReduce(reduce) => {
                    f.all_reduce(src, dst, count, element, word(reduce), comm, stream)
                }
                Kind::Reduce { reduce, root } => {
                    // Only the root's destination is written.
                    let dst = if dst.is_null() { src } else { dst };
                    f.reduce(src, dst, count, element, word(reduce), root as c_int, comm, stream)
                }
                Kind::AllGather => f.all_gather(src, dst, count, element, comm, stream),
                Kind::ReduceScatter(reduce) => {
                    f.reduce_scatter(src, dst, count, element, word(reduce), comm, stream)
                }
                Kind::Broadcast { root } => {
                    // The root has a source, the others have a destination.
                    let (from, to) = if src.is_null() { (dst, dst) } else { (src, src) };
                    f.broadcast(from, to, count, element, root as c_int, comm, stream)
                }
                Kind::AllToAll => {
                    let bytes = (s.count * s.element.size()) as usize;
                    for rank in 0..self.size {
                        let (part, peer) = (rank as usize * bytes, rank as c_int);
                        let [from, to] = [src, dst].map(|at| at.wrapping_byte_add(part));
                        f.send(from, count, element, peer, comm, stream)?;
                        f.recv(to, count, element, peer, comm, stream)?;
                    }
                    Ok(())
                }
                Kind::Barrier => {
                    f.all_reduce(dst, dst, 1, BYTE, word(Reduce::Largest), comm, stream)
                }
                Kind::Send { to } => f.send(src, count, element, to as c_int, comm, stream),
                Kind::Recv { from } => f.recv(dst, count, element, from as c_int, comm, stream),
            }
        }
    }
}

impl Communicator for Part {
    unsafe fn enqueue(&self, stream: u64, calls: &[Call<'_>]) -> Result<()> {
        let comm = {
            let mut state = self.state.lock();
            state.captured |= calls.iter().any(|c| c.signature.captured);
            let comm = state.comm()?;
            state.inside += 1;
            comm
        };
        let stream = stream as usize as *mut c_void;
        // A call of no elements moves nothing, on no rank.
        let mut calls =
            calls.iter().filter(|c| c.signature.count != 0 || c.signature.kind == Kind::Barrier);
        let several =
            calls.clone().count() > 1 || calls.clone().any(|c| c.signature.kind == Kind::AllToAll);
        // SAFETY: by the contract. A group that began ends, also after an error.
        let mut made = || unsafe {
            if !several {
                return calls.try_for_each(|call| self.call(comm, stream, call));
            }
            let f = &self.api.functions;
            f.group_start()?;
            let made = calls.try_for_each(|call| self.call(comm, stream, call));
            let ended = f.group_end();
            made.and(ended)
        };
        let made = made();
        self.state.lock().inside -= 1;
        made
    }

    fn abort(&self, cause: Error) {
        let (comm, captured) = {
            let mut state = self.state.lock();
            state.cause.get_or_insert(cause);
            (state.comm.take(), state.captured)
        };
        let Some(comm) = comm else { return };
        // A call that took the communicator before goes into the library first, which is soon. The
        // library may hold it there until the abort.
        let until = Instant::now() + ENTRY;
        while self.state.lock().inside != 0 && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        let f = &self.api.functions;
        let run = move || {
            // The whole value goes into the closure.
            let Raw(comm) = { comm };
            // SAFETY: the communicator lives until here, and no later call begins. The library
            // allows its end beside a call, which returns then. Graphs with its calls are launched
            // no more, and the library keeps its memory until they are gone.
            let _ = unless_exiting(|| unsafe { f.abort(comm) });
        };
        if captured {
            // The library ends what runs at once, and then waits for the end of the graphs.
            let spawned = thread::Builder::new().name("lh-collective".to_owned()).spawn(run);
            drop(spawned);
        } else {
            run();
        }
    }

    fn failure(&self) -> Option<Error> {
        // Held, so that no abort ends the communicator meanwhile. The library does not block here.
        let state = self.state.lock();
        let comm = state.comm().ok()?;
        let mut code = 0;
        let f = &self.api.functions;
        // SAFETY: the communicator lives while the lock is held.
        let asked = unless_exiting(|| unsafe { f.async_error(comm, &raw mut code) })?;
        asked.and_then(|()| f.said("ncclCommGetAsyncError", code, comm)).err()
    }

    unsafe fn register(&self, addr: u64, bytes: u64) -> Result<u64> {
        let Some(windows) = &self.api.windows else {
            return Err(unsupported(format!(
                "{} has no windows; NCCL 2.27 or newer has",
                self.api.name
            )));
        };
        // Without the lock: it waits for the other ranks, and an abort must find the communicator.
        let comm = self.state.lock().comm()?;
        // SAFETY: the caller vouches for the memory. The communicator lives, or an abort beside
        // this call ends it, which the library allows.
        let (code, window) = unsafe { windows.register(comm, addr, bytes) };
        self.api.functions.said("ncclCommWindowRegister", code, comm)?;
        if window == 0 {
            return Err(unsupported(
                "NCCL makes no windows of these GPUs: each must reach the memory of each other one",
            ));
        }
        Ok(window)
    }

    fn deregister(&self, window: u64) -> Result<()> {
        // Held, so that no abort ends the communicator meanwhile. The call waits for no other rank.
        let state = self.state.lock();
        let (Ok(comm), Some(windows)) = (state.comm(), &self.api.windows) else { return Ok(()) };
        // SAFETY: the communicator lives while the lock is held, and gave this window.
        let code = unless_exiting(|| unsafe { windows.deregister(comm, window) });
        self.api.functions.said("ncclCommWindowDeregister", code.unwrap_or_default(), comm)
    }

    fn destroy(&self) -> Result<()> {
        let Some(Raw(comm)) = self.state.lock().comm.take() else { return Ok(()) };
        // SAFETY: the communicator lives until here, and nothing uses it any more: the layer above
        // destroys a part after its last call.
        unless_exiting(|| unsafe { self.api.functions.destroy(comm) }).unwrap_or(Ok(()))
    }
}

/// The time in which a thread that has begun a call comes into the library.
const ENTRY: Duration = Duration::from_millis(100);
/// `ncclUint8`.
const BYTE: c_int = 1;

/// The library's element type, and the number of them. It has no 16-bit integers: they are moved as
/// bytes, and not reduced.
fn words(element: ElementType, count: u64, kind: Kind) -> Result<(usize, c_int)> {
    let reduces = matches!(kind, Kind::AllReduce(_) | Kind::Reduce { .. } | Kind::ReduceScatter(_));
    let word = match element {
        ElementType::I8 => 0,
        ElementType::U8 => BYTE,
        ElementType::I32 => 2,
        ElementType::U32 => 3,
        ElementType::I64 => 4,
        ElementType::U64 => 5,
        ElementType::F16 => 6,
        ElementType::F32 => 7,
        ElementType::F64 => 8,
        ElementType::Bf16 => 9,
        ElementType::I16 | ElementType::U16 if reduces => {
            return Err(unsupported(format!(
                "NCCL does not reduce {element}; convert to i32 or f32 first"
            )));
        }
        ElementType::I16 | ElementType::U16 => {
            return Ok((elements(count.saturating_mul(2))?, BYTE));
        }
    };
    Ok((elements(count)?, word))
}

fn elements(count: u64) -> Result<usize> {
    usize::try_from(count).map_err(|_| Error::invalid(format!("{count} elements are too many")))
}

/// `ncclRedOp_t`.
fn word(reduce: Reduce) -> c_int {
    match reduce {
        Reduce::Sum => 0,
        Reduce::Product => 1,
        Reduce::Largest => 2,
        Reduce::Least => 3,
        Reduce::Average => 4,
    }
}
