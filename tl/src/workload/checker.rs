//! Executes a program and checks each of its steps against a naive model of the semantics.
//!
//! The model follows the table of semantics, with vectors and maps; it must not share code with the
//! manager. Objects come from an arena of this thread. The arena reuses an address at once after
//! its object was destroyed, which is the hardest case for code that keeps addresses.
//!
//! The checks: each destructor runs exactly once, at the model's time. An object that is alive in
//! the model is intact at each use. Slot buffers, including outgrown ones, are readable until their
//! frame ends. The depth is right after every operation.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;

use super::program::{Op, Program, What};
use super::{new_vector, push};
use crate::{MemoryManager, OpaqueTensor};

const ALIVE: u64 = 0xA11F_EA11_FEA1_1FEA;
const POISON: u64 = 0xDEAD_DEAD_DEAD_DEAD;

/// An object of the arena.
#[derive(Debug)]
#[repr(C)]
struct Block {
    state: u64,
    id: u64,
    payload: [u64; 6],
}

#[derive(Default)]
struct Arena {
    free: Vec<*mut Block>,
    all: Vec<*mut Block>,
    next: u64,
    destroyed: Vec<u64>,
    faults: Vec<String>,
}

impl Drop for Arena {
    fn drop(&mut self) {
        for &block in &self.all {
            // SAFETY: `make` made the block with `Box::into_raw`, and it is freed only here.
            drop(unsafe { Box::from_raw(block) });
        }
    }
}

thread_local! {
    static ARENA: RefCell<Arena> = RefCell::default();
}

fn make() -> (*mut c_void, u64) {
    ARENA.with_borrow_mut(|arena| {
        let block = arena.free.pop().unwrap_or_else(|| {
            let block =
                Box::into_raw(Box::new(Block { state: POISON, id: 0, payload: [POISON; 6] }));
            arena.all.push(block);
            block
        });
        arena.next += 1;
        // SAFETY: the block belongs to the arena and is not in use.
        unsafe { block.write(Block { state: ALIVE, id: arena.next, payload: [arena.next; 6] }) };
        (block.cast(), arena.next)
    })
}

unsafe extern "C" fn destroy(object: *mut c_void) {
    ARENA.with_borrow_mut(|arena| {
        let block: *mut Block = object.cast();
        // SAFETY: blocks of the arena stay allocated until the thread ends.
        let (state, id) = unsafe { ((*block).state, (*block).id) };
        if state != ALIVE {
            arena.faults.push(format!("object {id} was destroyed twice"));
            return;
        }
        // SAFETY: the arena's blocks belong to this thread, and stay until it ends.
        unsafe { block.write(Block { state: POISON, id, payload: [POISON; 6] }) };
        arena.destroyed.push(id);
        arena.free.push(block);
    });
}

unsafe extern "C" fn destroy_tensor(tensor: *mut OpaqueTensor) {
    // SAFETY: the tensors of the checker are blocks of its arena.
    unsafe { destroy(tensor.cast()) };
}

/// Returns whether the object at `addr` is still `id`, with intact contents.
fn intact(addr: usize, id: u64) -> bool {
    let block: *const Block = ptr::with_exposed_provenance(addr);
    // SAFETY: the callers pass only addresses of arena blocks, which stay allocated.
    let block = unsafe { &*block };
    block.state == ALIVE && block.id == id && block.payload == [id; 6]
}

#[derive(Clone, Debug)]
enum Shape {
    Struct,
    Tensor,
    Vector(Vec<usize>),
}

#[derive(Clone, Debug)]
struct Object {
    id: u64,
    life: u64,
    count: u32,
    shape: Shape,
}

/// The naive model of the semantics.
struct Model {
    objects: HashMap<usize, Object>,
    /// Dead tensors that wait for the end of the scope: address, object, depth.
    quarantine: Vec<(usize, Object, usize)>,
    scopes: Vec<Vec<(usize, u64)>>,
    frames: Vec<Frame>,
    destroyed: Vec<u64>,
    lives: u64,
    quarantined: bool,
}

#[derive(Debug)]
struct Frame {
    /// The depth before the frame was opened.
    depth: usize,
    slots: i64,
    /// All buffers that the frame has returned, and the present one of each slot.
    buffers: Vec<Buffer>,
    current: HashMap<i64, usize>,
}

#[derive(Clone, Copy, Debug)]
struct Buffer {
    at: *mut u8,
    len: usize,
    fill: u8,
}

impl Model {
    fn floor(&self) -> usize {
        self.frames.last().map_or(1, |f| f.depth + 1)
    }

    fn insert(&mut self, addr: usize, id: u64, shape: Shape) {
        self.lives += 1;
        self.objects.insert(addr, Object { id, life: self.lives, count: 1, shape });
        self.scopes.last_mut().expect("depth is at least 1").push((addr, self.lives));
    }

    fn register(&mut self, addr: usize) {
        if let Some(object) = self.objects.get_mut(&addr) {
            object.count += 1;
            let life = object.life;
            self.scopes.last_mut().expect("depth is at least 1").push((addr, life));
        } else if let Some(i) = self.quarantine.iter().position(|q| q.0 == addr) {
            let (_, object, _) = self.quarantine.remove(i);
            self.insert(addr, object.id, object.shape);
        }
    }

    fn release(&mut self, addr: usize) {
        let Some(object) = self.objects.get_mut(&addr) else { return };
        object.count -= 1;
        if object.count > 0 {
            return;
        }
        let object = self.objects.remove(&addr).expect("just seen");
        match &object.shape {
            Shape::Struct => self.destroyed.push(object.id),
            Shape::Tensor if self.quarantined => {
                self.quarantine.push((addr, object, self.scopes.len()))
            }
            Shape::Tensor => self.destroyed.push(object.id),
            Shape::Vector(elements) => elements.iter().for_each(|&e| self.release(e)),
        }
    }

    fn close_scope(&mut self) {
        while let Some((addr, life)) = self.scopes.last_mut().expect("depth is at least 1").pop() {
            if self.objects.get(&addr).is_some_and(|o| o.life == life) {
                self.release(addr);
            }
        }
        let depth = self.scopes.len();
        let destroyed = &mut self.destroyed;
        self.quarantine.retain(|(_, object, died)| {
            if *died >= depth {
                destroyed.push(object.id);
            }
            *died < depth
        });
        self.scopes.pop();
    }

    fn close_to(&mut self, depth: usize) {
        while self.scopes.len() > depth.max(1) {
            self.close_scope();
        }
    }

    /// The newest record: (scope, position).
    fn newest(&self, addr: usize) -> Option<(usize, usize)> {
        let life = self.objects.get(&addr)?.life;
        let found =
            |(i, s): (usize, &Vec<_>)| Some((i, s.iter().rposition(|&r| r == (addr, life))?));
        self.scopes.iter().enumerate().rev().find_map(found)
    }

    fn promote(&mut self, addr: usize) {
        let top = self.scopes.len() - 1;
        if top > 0
            && let Some((scope, at)) = self.newest(addr)
            && scope == top
        {
            let record = self.scopes[top].remove(at);
            self.scopes[top - 1].push(record);
        }
    }
}

/// The result of a run.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The detected faults; empty if none.
    pub faults: Vec<String>,
    /// Operations executed.
    pub operations: usize,
    /// Objects made.
    pub objects: u64,
}

/// Prepares `manager` with a tensor destructor that the checker observes. Must be called once
/// before [`run`].
pub fn prepare(manager: &mut MemoryManager) {
    // SAFETY: every tensor that the checker registers is a block of the arena.
    unsafe { manager.set_tensor_destructor(Some(destroy_tensor)) };
}

/// Runs `program` on an attachment to `manager` (prepared); `quarantined` says whether its
/// quarantine is on. At the end the remaining objects of the program are released and the
/// attachment is dropped. Then all of its objects must be destroyed.
pub fn run(manager: &MemoryManager, program: &Program, quarantined: bool) -> Outcome {
    let mut attached = manager.attach();
    let mut model = Model {
        objects: HashMap::new(),
        quarantine: Vec::new(),
        scopes: vec![Vec::new()],
        frames: Vec::new(),
        destroyed: Vec::new(),
        lives: 0,
        quarantined,
    };
    let made = ARENA.with_borrow(|a| a.next);
    let mut run = Run {
        vars: vec![(ptr::null_mut(), 0); program.vars],
        marks: vec![(0, 0, 0); program.marks],
        outcome: Outcome::default(),
    };
    for (step, &op) in program.ops.iter().enumerate() {
        run.step(&mut attached, &mut model, op);
        run.compare(&mut model, || format!("step {step} {op:?}"));
        if attached.scope_depth() != model.scopes.len() {
            let (is, should) = (attached.scope_depth(), model.scopes.len());
            run.outcome.faults.push(format!("step {step} {op:?}: depth {is}, expected {should}"));
        }
        if run.outcome.faults.len() > 5 {
            return run.outcome;
        }
    }
    if attached.scope_depth() != 1 {
        run.outcome.faults.push(format!("depth {} at the end", attached.scope_depth()));
    }
    run.check_buffers(&model);
    while let Some(&addr) = model.objects.keys().next() {
        attached.release_ptr(ptr::with_exposed_provenance_mut(addr));
        model.release(addr);
        run.compare(&mut model, || "releasing what the program owns".into());
    }
    drop(attached);
    model.frames.clear();
    model.close_to(1);
    model.close_scope();
    run.compare(&mut model, || "detaching".into());
    run.outcome.operations = program.ops.len();
    run.outcome.objects = ARENA.with_borrow(|a| a.next) - made;
    let alive = ARENA.with_borrow(|a| a.all.len() - a.free.len());
    if alive != 0 {
        run.outcome.faults.push(format!("{alive} objects are still alive"));
    }
    run.outcome
}

struct Run {
    vars: Vec<(*mut c_void, u64)>,
    marks: Vec<(i64, usize, usize)>,
    outcome: Outcome,
}

impl Run {
    /// Compares the objects destroyed since the last comparison with the model's.
    fn compare(&mut self, model: &mut Model, when: impl FnOnce() -> String) {
        let (mut seen, faults) = ARENA
            .with_borrow_mut(|a| (std::mem::take(&mut a.destroyed), std::mem::take(&mut a.faults)));
        self.outcome.faults.extend(faults);
        let mut expected = std::mem::take(&mut model.destroyed);
        seen.sort_unstable();
        expected.sort_unstable();
        if seen != expected {
            self.outcome
                .faults
                .push(format!("{}: destroyed {seen:?}, expected {expected:?}", when()));
        }
    }

    fn step(&mut self, manager: &mut MemoryManager, model: &mut Model, op: Op) {
        match op {
            Op::Enter => {
                manager.enter_scope();
                model.scopes.push(Vec::new());
            }
            Op::Exit => {
                manager.exit_scope();
                if model.scopes.len() > model.floor() {
                    model.close_scope();
                }
            }
            Op::FunctionEnter(slots) => {
                manager.function_enter(usize::try_from(slots).unwrap_or(usize::MAX));
                let depth = model.scopes.len();
                model.frames.push(Frame {
                    depth,
                    slots,
                    buffers: Vec::new(),
                    current: HashMap::new(),
                });
                model.scopes.push(Vec::new());
            }
            Op::FunctionExit => {
                self.check_buffers(model);
                manager.function_exit();
                if let Some(frame) = model.frames.pop() {
                    model.close_to(frame.depth);
                }
            }
            Op::Buffer { slot, size } => self.buffer(manager, model, slot, size),
            Op::New(var, what) => self.make(manager, model, var, what),
            Op::NewVec(var) => {
                let vec = new_vector().cast::<c_void>();
                self.vars[var] = (vec, 0);
                // SAFETY: the vector is new.
                unsafe { manager.register_vec_ptr(vec) };
                model.insert(vec.expose_provenance(), 0, Shape::Vector(Vec::new()));
            }
            Op::Push(vec, element) => self.push(manager, model, vec, element),
            Op::Register(var) => {
                manager.register_ptr(self.vars[var].0);
                model.register(self.vars[var].0.addr());
            }
            Op::Promote(var) => {
                manager.promote(self.vars[var].0);
                model.promote(self.vars[var].0.addr());
            }
            Op::Unregister(var) => {
                manager.unregister_nearest(self.vars[var].0);
                if let Some((scope, at)) = model.newest(self.vars[var].0.addr()) {
                    model.scopes[scope].remove(at);
                }
            }
            Op::Acquire(var) => {
                // An unknown address would get an untyped entry; other programs check this case.
                if let Some(object) = model.objects.get_mut(&self.vars[var].0.addr()) {
                    object.count += 1;
                    manager.acquire_ptr(self.vars[var].0);
                }
            }
            Op::Release(var) => {
                let addr = self.vars[var].0.addr();
                let known = model.objects.contains_key(&addr);
                if manager.release_ptr(self.vars[var].0) != known {
                    self.outcome.faults.push(format!("{op:?}: found {}, expected {known}", !known));
                }
                model.release(addr);
            }
            Op::Assign(from, to) => self.vars[to] = self.vars[from],
            Op::Use(var) => self.look(manager, model, var),
            Op::ReleaseUnknown => {
                if manager.release_ptr(ptr::without_provenance_mut(0x1234_5670)) {
                    self.outcome.faults.push("an unknown address was released".into());
                }
            }
            Op::Mark(mark) => {
                self.marks[mark] = (manager.mark(), model.scopes.len(), model.frames.len())
            }
            Op::Unwind(mark) => self.unwind(manager, model, mark),
        }
    }

    /// Makes an object and registers it.
    fn make(&mut self, manager: &MemoryManager, model: &mut Model, var: usize, what: What) {
        let (object, id) = make();
        self.vars[var] = (object, id);
        let addr = object.expose_provenance();
        // SAFETY: a live block of the arena, with a matching destructor.
        unsafe {
            match what {
                What::Struct => manager.register_custom(object, destroy),
                What::Tensor => manager.register_tensor(object.cast()),
            }
        }
        let shape = if what == What::Struct { Shape::Struct } else { Shape::Tensor };
        model.insert(addr, id, shape);
    }

    /// Appends an element to a vector.
    fn push(&self, manager: &MemoryManager, model: &mut Model, vec: usize, element: usize) {
        let (vec, element) = (self.vars[vec].0, self.vars[element].0);
        // Only if both are alive in the model: otherwise the program itself would use freed
        // memory.
        if !model.objects.contains_key(&element.addr()) {
            return;
        }
        if let Some(Object { shape: Shape::Vector(elements), .. }) =
            model.objects.get_mut(&vec.addr())
        {
            elements.push(element.addr());
            // SAFETY: the vector is alive in the model.
            unsafe { push(vec.cast(), element) };
            manager.acquire_ptr(element);
            if let Some(object) = model.objects.get_mut(&element.addr()) {
                object.count += 1;
            }
        }
    }

    /// Looks at an object, which must be what the model says.
    fn look(&mut self, manager: &MemoryManager, model: &Model, var: usize) {
        let (object, id) = self.vars[var];
        let alive = model.objects.get(&object.addr()).is_some_and(|o| o.id == id && id != 0);
        if alive && !intact(object.addr(), id) {
            self.outcome.faults.push(format!("object {id} was destroyed while in use"));
        }
        let registered = model.newest(object.addr()).is_some();
        if manager.is_registered(object) != registered {
            self.outcome.faults.push(format!("Use({var}): is_registered should be {registered}"));
        }
    }

    /// Closes what was opened since a mark, if the mark encloses the present position.
    fn unwind(&mut self, manager: &MemoryManager, model: &mut Model, mark: usize) {
        let (value, depth, frames) = self.marks[mark];
        self.check_buffers(model);
        manager.unwind(value);
        let encloses = depth <= model.scopes.len()
            && frames <= model.frames.len()
            && depth > 0
            && (frames == 0 || model.frames[frames - 1].depth < depth)
            && model.frames.get(frames).is_none_or(|f| f.depth >= depth);
        if encloses {
            while model.frames.len() > frames {
                let frame = model.frames.pop().expect("more than `frames`");
                model.close_to(frame.depth);
            }
            model.close_to(depth);
        }
    }

    fn buffer(&mut self, manager: &mut MemoryManager, model: &mut Model, slot: i64, size: i64) {
        let unsigned = |n: i64| usize::try_from(n).unwrap_or(usize::MAX);
        let at: *mut u8 = manager.get_buffer(unsigned(slot), unsigned(size)).cast();
        let frame = model.frames.last_mut();
        let allowed = size >= 0 && frame.as_ref().is_some_and(|f| (0..f.slots).contains(&slot));
        if at.is_null() == allowed {
            self.outcome.faults.push(format!("get_buffer({slot}, {size}) gave {at:?}"));
        }
        if let Some(Frame { current, buffers, .. }) = frame
            && allowed
            && !at.is_null()
        {
            let len = unsigned(size);
            let fill = (buffers.len() as u8) ^ 0x5A;
            // SAFETY: the manager promises `size` bytes at the address.
            unsafe { at.write_bytes(fill, len) };
            match current.get(&slot).and_then(|&i| buffers.get_mut(i)).filter(|b| b.at == at) {
                // The same buffer: the first `len` bytes are new, the others are unchanged; the
                // check covers the new part.
                Some(buffer) => *buffer = Buffer { at, len, fill },
                None => {
                    if buffers.iter().any(|b| b.at == at) {
                        self.outcome
                            .faults
                            .push(format!("get_buffer({slot}, {size}) gave an outgrown buffer"));
                    }
                    current.insert(slot, buffers.len());
                    buffers.push(Buffer { at, len, fill });
                }
            }
        }
    }

    /// Checks that every buffer of every frame, outgrown or not, still has its contents.
    fn check_buffers(&mut self, model: &Model) {
        for buffer in model.frames.iter().flat_map(|f| &f.buffers) {
            // SAFETY: the manager promises that buffers stay readable until their frame ends.
            let bytes = unsafe { std::slice::from_raw_parts(buffer.at, buffer.len) };
            if bytes.iter().any(|&b| b != buffer.fill) {
                self.outcome.faults.push(format!("a slot buffer lost its contents: {buffer:?}"));
            }
        }
    }
}
