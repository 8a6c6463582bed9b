//! A resource whose every step can be observed and made to fail.

use leasehold_core::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::*;

/// The observed events of the items, and the failures to cause.
#[derive(Debug, Default)]
pub struct Log {
    pub created: AtomicU64,
    pub recycled: AtomicU64,
    pub destroyed: AtomicU64,
    /// The numbers of the destroyed items, until a test takes them.
    pub gone: Mutex<Vec<u64>>,
    pub destroy_at_once: AtomicBool,
    pub fail_create: AtomicBool,
    pub panic_create: AtomicBool,
    pub panic_fits: AtomicBool,
    pub panic_recycle: AtomicBool,
    pub panic_destroy: AtomicBool,
}

impl Log {
    pub fn set(&self, knob: impl Fn(&Self) -> &AtomicBool, on: bool) {
        knob(self).store(on, SeqCst);
    }

    pub fn counts(&self) -> (u64, u64, u64) {
        (self.created.load(SeqCst), self.recycled.load(SeqCst), self.destroyed.load(SeqCst))
    }

    /// Items that exist.
    pub fn alive(&self) -> u64 {
        self.created.load(SeqCst) - self.destroyed.load(SeqCst)
    }
}

#[derive(Debug)]
pub struct Item {
    pub number: u64,
    pub size: u64,
    /// The holder's last write; heap memory, so that sanitizers detect a wrong access.
    pub text: Box<str>,
    pub parent: Option<Lease<Item>>,
    /// The payload itself reports its drop, so a double drop or a missing one shows.
    log: Arc<Log>,
}

impl Drop for Item {
    fn drop(&mut self) {
        self.log.destroyed.fetch_add(1, SeqCst);
        self.log.gone.lock().push(self.number);
    }
}

impl Tagged for Item {
    type Tag = tags::Buffer;
}

#[derive(Debug, Default, Clone)]
pub struct Items {
    pub log: Arc<Log>,
}

/// A request for an item of at least this size.
#[derive(Default)]
pub struct Want<'a> {
    pub size: u64,
    pub parent: Option<Lease<Item>>,
    /// Runs inside `create`.
    pub during: Option<&'a (dyn Fn(Handle<tags::Buffer>) + Sync)>,
}

pub fn want(size: u64) -> Want<'static> {
    Want { size, ..Want::default() }
}

impl Resource for Items {
    type Payload = Item;
    type Request<'a> = Want<'a>;
    const NAME: &'static str = "item";

    fn create(&self, handle: Handle<tags::Buffer>, want: &Want<'_>) -> Result<Item> {
        if let Some(during) = want.during {
            during(handle);
        }
        assert!(!self.log.panic_create.load(SeqCst), "create was told to panic");
        if self.log.fail_create.load(SeqCst) {
            return Err(Error::Unavailable("create was told to fail".into()));
        }
        let number = self.log.created.fetch_add(1, SeqCst);
        let parent = want.parent.clone();
        Ok(Item {
            number,
            size: want.size,
            text: format!("item {number}").into(),
            parent,
            log: self.log.clone(),
        })
    }

    fn fits(&self, idle: &mut Item, want: &Want<'_>) -> bool {
        assert!(!self.log.panic_fits.load(SeqCst), "fits was told to panic");
        assert!(idle.parent.is_none(), "an idle resource pins no parent");
        if idle.size < want.size {
            return false;
        }
        idle.parent = want.parent.clone();
        true
    }

    fn recycle(&self, item: &mut Item) -> Recycle {
        self.log.recycled.fetch_add(1, SeqCst);
        assert!(!self.log.panic_recycle.load(SeqCst), "recycle was told to panic");
        item.parent = None;
        if self.log.destroy_at_once.load(SeqCst) { Recycle::Destroy } else { Recycle::Keep }
    }

    fn destroy(&self, item: Item) {
        assert!(!self.log.panic_destroy.load(SeqCst), "destroy was told to panic");
        drop(item);
    }
}

pub fn config() -> PoolConfig {
    PoolConfig { block: 2, ..PoolConfig::default() }
}

/// A pool of items and their log.
pub fn pool(config: PoolConfig) -> (SlotPool<Items>, Arc<Log>) {
    let items = Items::default();
    let log = items.log.clone();
    (SlotPool::new(items, config).expect("a valid configuration"), log)
}

/// A configured manager of items and their log.
pub fn manager(config: PoolConfig) -> (PoolManager<Items, u32>, Arc<Log>) {
    let items = Items::default();
    let log = items.log.clone();
    let manager = PoolManager::new();
    manager.configure(items, config).expect("a valid configuration");
    (manager, log)
}

/// With and without thread cells: every rule holds for both.
pub fn both(test: impl Fn(PoolConfig)) {
    for thread_cells in [false, true] {
        test(PoolConfig { thread_cells, ..config() });
    }
}

/// The variant of an error.
pub fn kind<T>(result: Result<T>) -> &'static str {
    match result {
        Ok(_) => "Ok",
        Err(e) => e.kind(),
    }
}

/// Runs a function that panics on purpose.
pub fn panics(f: impl FnOnce()) {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).expect_err("this was told to panic");
}
