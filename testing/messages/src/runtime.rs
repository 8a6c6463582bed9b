//! The functions of an Objective-C runtime that `objc2` and `block2` call.

use leasehold_core::sync::Mutex;
use leasehold_core::sync::atomic::{AtomicUsize, Ordering};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, c_char, c_void};
use std::ptr;

/// A class. Two classes are equal if their addresses are.
#[repr(C)]
pub struct Class {
    /// Null, which tells a class from an object.
    isa: *const Class,
    pub name: &'static str,
}

// SAFETY: a class never changes.
unsafe impl Sync for Class {}
// SAFETY: a class never changes.
unsafe impl Send for Class {}

/// The contents of an object.
#[derive(Debug, Default, Clone)]
pub struct Contents {
    /// Text with a zero at its end, or bytes.
    pub bytes: Vec<u8>,
    /// Members, each with a reference.
    pub items: Vec<Id>,
    /// A number.
    pub value: u64,
    /// The address of a block.
    pub block: usize,
}

/// An object.
#[repr(C)]
pub struct Object {
    isa: *const Class,
    count: AtomicUsize,
    pub contents: Mutex<Contents>,
}

/// A reference to an object, or nil.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct Id(pub *mut Object);

// SAFETY: an object's fields may be used by any thread.
unsafe impl Send for Id {}
// SAFETY: an object's fields may be used by any thread.
unsafe impl Sync for Id {}

/// A method's address, to be called with its own types.
pub type Imp = *const c_void;

#[derive(Default)]
struct World {
    classes: HashMap<&'static str, &'static Class>,
    selectors: HashMap<&'static str, &'static CStr>,
    /// The live objects, by address, with the names of their classes.
    live: BTreeMap<usize, &'static str>,
    messages: Vec<String>,
    mistakes: Vec<String>,
}

static WORLD: Mutex<Option<World>> = Mutex::new(None);

thread_local! {
    static POOLS: RefCell<Vec<Vec<Id>>> = const { RefCell::new(Vec::new()) };
}

fn world<T>(f: impl FnOnce(&mut World) -> T) -> T {
    f(WORLD.lock().get_or_insert_default())
}

/// Records a message.
pub fn record(message: String) {
    world(|w| w.messages.push(message));
}

/// The messages since the last call.
pub fn take_messages() -> Vec<String> {
    world(|w| std::mem::take(&mut w.messages))
}

/// Uses of dead objects, and autoreleases without a pool.
pub fn take_mistakes() -> Vec<String> {
    world(|w| std::mem::take(&mut w.mistakes))
}

fn mistake(what: String) {
    world(|w| w.mistakes.push(what));
}

/// The number of live objects of each class.
pub fn live() -> BTreeMap<&'static str, usize> {
    world(|w| {
        let mut counts = BTreeMap::new();
        w.live.values().for_each(|name| *counts.entry(*name).or_default() += 1);
        counts
    })
}

/// The class of this name, which exists from the first call on.
pub fn class(name: &str) -> &'static Class {
    world(|w| {
        if let Some(class) = NAMED.iter().find(|c| c.name == name).or_else(|| w.classes.get(name)) {
            return *class;
        }
        let name: &'static str = name.to_owned().leak();
        let class = Box::leak(Box::new(Class { isa: ptr::null(), name }));
        w.classes.insert(name, class);
        class
    })
}

impl Id {
    pub const NIL: Self = Self(ptr::null_mut());

    /// A new object with one reference.
    pub fn new(name: &str) -> Self {
        let class = class(name);
        let object = Object { isa: class, count: AtomicUsize::new(1), contents: Mutex::default() };
        let id = Self(Box::into_raw(Box::new(object)));
        world(|w| w.live.insert(id.0 as usize, class.name));
        id
    }

    /// The name of the object's class; of a class, its own name. `None` for nil.
    pub fn class_name(self) -> Option<&'static str> {
        if self.0.is_null() {
            return None;
        }
        let live = world(|w| w.live.get(&(self.0 as usize)).copied());
        if live.is_some() {
            return live;
        }
        let known = world(|w| {
            let mut all = NAMED.iter().chain(w.classes.values());
            all.find(|c| ptr::from_ref(**c) as usize == self.0 as usize).map(|c| c.name)
        });
        if known.is_none() {
            mistake(format!("a message or a reference to {:p}, which is dead", self.0));
        }
        known
    }

    /// Changes or reads the contents of a live object.
    pub fn with<T>(self, f: impl FnOnce(&mut Contents) -> T) -> T {
        // SAFETY: the callers are methods, whose receiver and arguments are live.
        let object = unsafe { &*self.0 };
        f(&mut object.contents.lock())
    }

    fn is_object(self) -> bool {
        !self.0.is_null() && world(|w| w.live.contains_key(&(self.0 as usize)))
    }

    pub fn retain(self) -> Self {
        if self.is_object() {
            // SAFETY: the object is live.
            unsafe { &*self.0 }.count.fetch_add(1, Ordering::Relaxed);
        } else {
            // A class has no count; a dead object is a mistake.
            let _ = self.class_name();
        }
        self
    }

    pub fn release(self) {
        if !self.is_object() {
            let _ = self.class_name();
            return;
        }
        // SAFETY: the object is live.
        if unsafe { &*self.0 }.count.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let Contents { items, block, .. } = self.with(|c| c.clone());
        items.into_iter().for_each(Self::release);
        if block != 0 {
            // SAFETY: the contents own the block.
            unsafe { _Block_release(block as *const c_void) };
        }
        world(|w| w.live.remove(&(self.0 as usize)));
        // SAFETY: this was the last reference, of a box that `new` made.
        drop(unsafe { Box::from_raw(self.0) });
    }

    /// Leaves one reference to the innermost pool of the thread.
    pub fn autorelease(self) -> Self {
        let pooled =
            POOLS.with_borrow_mut(|pools| pools.last_mut().map(|p| p.push(self)).is_some());
        if !pooled {
            mistake(format!("an autorelease of {:?} without a pool", self.class_name()));
        }
        self
    }
}

macro_rules! classes {
    ($($name:ident)*) => {
        /// The classes that the bindings name.
        mod named {
            use super::Class;
            $(
                #[unsafe(export_name = concat!("_OBJC_CLASS_", stringify!($name)))]
                pub(super) static $name: Class = Class { isa: std::ptr::null(), name: stringify!($name) };
            )*
        }
        static NAMED: &[&Class] = &[$(&named::$name),*];
    };
}

classes! {
    NSArray NSData NSDictionary NSError NSString NSURL MTLCaptureManager MTLCommandBufferDescriptor MTLCompileOptions
    MTLComputePassDescriptor MTLComputePipelineDescriptor MTLCounterSampleBufferDescriptor MTLHeapDescriptor
    MTLIndirectCommandBufferDescriptor MTLResidencySetDescriptor MTLSharedEventListener
}

macro_rules! exported {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)? $body:block)*) => {
        $(
            $(#[$meta])*
            ///
            /// # Safety
            /// - As the function of the same name of an Objective-C runtime.
            #[unsafe(no_mangle)]
            pub unsafe extern "C-unwind" fn $name($($arg: $ty),*) $(-> $ret)? $body
        )*
    };
}

exported! {
    /// The method for a message.
    fn objc_msg_lookup(receiver: Id, selector: *const c_char) -> Imp {
        // SAFETY: selectors are strings that `sel_registerName` keeps.
        let selector = unsafe { CStr::from_ptr(selector) }.to_str().unwrap_or("?");
        let Some(name) = receiver.class_name() else { return crate::metal::nothing() };
        crate::metal::method(name, selector)
            .unwrap_or_else(|| panic!("{name} has no method {selector}"))
    }

    /// The selector of a name.
    fn sel_registerName(name: *const c_char) -> *const c_char {
        // SAFETY: the caller gives a string.
        let name = unsafe { CStr::from_ptr(name) };
        world(|w| {
            let text = name.to_str().unwrap_or("?");
            if let Some(selector) = w.selectors.get(text) {
                return selector.as_ptr();
            }
            let kept: &'static CStr = Box::leak(name.to_owned().into_boxed_c_str());
            w.selectors.insert(kept.to_str().unwrap_or("?"), kept);
            kept.as_ptr()
        })
    }

    /// The name of a selector.
    fn sel_getName(selector: *const c_char) -> *const c_char { selector }

    /// The class of a name.
    fn objc_getClass(name: *const c_char) -> *const Class {
        // SAFETY: the caller gives a string.
        class(unsafe { CStr::from_ptr(name) }.to_str().unwrap_or("?"))
    }

    /// The class of a name.
    fn objc_lookUpClass(name: *const c_char) -> *const Class {
        // SAFETY: the caller gives a string.
        unsafe { objc_getClass(name) }
    }

    /// The class of an object.
    fn object_getClass(object: Id) -> *const Class {
        object.class_name().map_or(ptr::null(), |name| ptr::from_ref(class(name)))
    }

    /// The name of a class.
    fn class_getName(class: *const Class) -> *const c_char {
        // SAFETY: classes live for ever.
        let name = unsafe { (*class).name };
        let name = std::ffi::CString::new(name).unwrap_or_default();
        // SAFETY: the text is a string; the runtime keeps it.
        unsafe { sel_registerName(name.as_ptr()) }
    }

    /// Whether a class is that of a class: the stand-ins have none.
    fn class_isMetaClass(class: *const Class) -> i8 {
        let _ = class;
        0
    }

    /// Whether two selectors are one.
    fn sel_isEqual(a: *const c_char, b: *const c_char) -> i8 { i8::from(a == b) }

    /// Takes a reference.
    fn objc_retain(object: Id) -> Id { object.retain() }

    /// Takes a reference to a result that a method autoreleased.
    fn objc_retainAutoreleasedReturnValue(object: Id) -> Id { object.retain() }

    /// Gives a reference back.
    fn objc_release(object: Id) {
        if object != Id::NIL {
            object.release();
        }
    }

    /// Leaves a reference to the pool.
    fn objc_autorelease(object: Id) -> Id { object.autorelease() }

    /// Opens a pool.
    fn objc_autoreleasePoolPush() -> *mut c_void {
        POOLS.with_borrow_mut(|pools| {
            pools.push(Vec::new());
            pools.len() as *mut c_void
        })
    }

    /// Closes a pool.
    fn objc_autoreleasePoolPop(pool: *mut c_void) {
        while let Some(pooled) = POOLS.with_borrow_mut(|pools| {
            if pools.len() < pool as usize { None } else { pools.pop() }
        }) {
            pooled.into_iter().for_each(Id::release);
        }
    }
}

// ---- Blocks

/// The beginning of a block; its captures follow.
#[repr(C)]
pub struct Block {
    isa: *const c_void,
    flags: u32,
    reserved: u32,
    pub invoke: *const c_void,
    descriptor: *const Descriptor,
}

#[repr(C)]
struct Descriptor {
    reserved: usize,
    size: usize,
    copy: Option<unsafe extern "C-unwind" fn(*mut Block, *const Block)>,
    dispose: Option<unsafe extern "C-unwind" fn(*mut Block)>,
}

const HAS_HELPERS: u32 = 1 << 25;
const ON_HEAP: u32 = 1 << 24;
const IS_GLOBAL: u32 = 1 << 28;
/// The count of references, in steps of two.
const COUNT: u32 = 0xfffe;

#[unsafe(no_mangle)]
pub static _NSConcreteStackBlock: Class = Class { isa: ptr::null(), name: "a block on a stack" };
#[unsafe(no_mangle)]
pub static _NSConcreteGlobalBlock: Class = Class { isa: ptr::null(), name: "a global block" };
static BLOCKS: AtomicUsize = AtomicUsize::new(0);

/// The number of blocks on the heap.
pub fn live_blocks() -> usize {
    BLOCKS.load(Ordering::Relaxed)
}

exported! {
    /// Copies a block to the heap, or takes a reference.
    fn _Block_copy(block: *const c_void) -> *mut c_void {
        let from = block.cast_mut().cast::<Block>();
        // SAFETY: the caller gives a block, whose helpers are its own.
        unsafe {
            if (*from).flags & IS_GLOBAL != 0 {
                return from.cast();
            }
            if (*from).flags & ON_HEAP != 0 {
                (*from).flags += 2;
                return from.cast();
            }
            let size = (*(*from).descriptor).size;
            let words = vec![0_u128; size.div_ceil(16)].into_boxed_slice();
            let to = Box::into_raw(words).cast::<Block>();
            ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast::<u8>(), size);
            (*to).flags = ((*from).flags & !COUNT) | ON_HEAP | 2;
            if let (true, Some(copy)) = ((*to).flags & HAS_HELPERS != 0, (*(*to).descriptor).copy) {
                copy(to, from);
            }
            BLOCKS.fetch_add(1, Ordering::Relaxed);
            to.cast()
        }
    }

    /// Gives a reference to a block back.
    fn _Block_release(block: *const c_void) {
        let block = block.cast_mut().cast::<Block>();
        // SAFETY: the caller gives a block, whose helpers are its own.
        unsafe {
            if (*block).flags & ON_HEAP == 0 {
                return;
            }
            if (*block).flags & COUNT == 0 {
                return mistake("a block is released too often".to_owned());
            }
            (*block).flags -= 2;
            if (*block).flags & COUNT != 0 {
                return;
            }
            let descriptor = (*block).descriptor;
            if let (true, Some(dispose)) = ((*block).flags & HAS_HELPERS != 0, (*descriptor).dispose) {
                dispose(block);
            }
            let words = (*descriptor).size.div_ceil(16);
            drop(Box::from_raw(ptr::slice_from_raw_parts_mut(block.cast::<u128>(), words)));
            BLOCKS.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
