//! Generated programs with the patterns that compilers emit, optionally with a compiler's bugs.
//!
//! A program is a flat list of operations over variables, made from a seed; the same seed gives the
//! same program. This module must not know what executes a program.

/// The kind of a variable's object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum What {
    /// A block that its destructor or `free` destroys.
    Struct,
    /// A tensor.
    Tensor,
}

/// One call, or one access of the program to an object. Variables, slots and marks are indices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// Opens a scope.
    Enter,
    /// Closes the scope.
    Exit,
    /// Opens a frame with this number of slots.
    FunctionEnter(i64),
    /// Closes the frame.
    FunctionExit,
    /// Requests a slot's buffer and fills it.
    Buffer {
        /// The slot.
        slot: i64,
        /// Bytes.
        size: i64,
    },
    /// Makes an object, registered in the current scope.
    New(usize, What),
    /// Makes an empty vector of pointers, registered in the current scope.
    NewVec(usize),
    /// Appends the second variable's object to the first one's vector, which counts it.
    Push(usize, usize),
    /// Registers the object once more.
    Register(usize),
    /// Moves a record to the parent scope.
    Promote(usize),
    /// Removes a record.
    Unregister(usize),
    /// Adds a count.
    Acquire(usize),
    /// Removes a count.
    Release(usize),
    /// The second variable takes the first one's value.
    Assign(usize, usize),
    /// Reads the object.
    Use(usize),
    /// Releases an unknown address.
    ReleaseUnknown,
    /// Records the position.
    Mark(usize),
    /// Closes everything since the mark.
    Unwind(usize),
}

/// A list of operations.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Program {
    /// The operations, in order.
    pub ops: Vec<Op>,
    /// Number of variables.
    pub vars: usize,
    /// Number of marks.
    pub marks: usize,
}

/// Pseudo-random numbers (SplitMix64: Steele, Lea, Flood, OOPSLA 2014).
#[derive(Clone, Copy, Debug)]
pub struct Rng(pub u64);

impl Rng {
    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `n`; 0 if `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next_u64().checked_rem(n).unwrap_or(0)
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// A pattern of compiled code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pattern {
    /// `a * b + c`: temporaries in a scope; the result leaves the scope.
    Expression,
    /// A function with a frame, whose result outlives it.
    Call,
    /// Structs that refer to each other.
    Graph,
    /// A variable assigned anew in each turn of a loop.
    Reassign,
    /// Two branches that make the same variable.
    Join,
    /// A comprehension: many scopes without objects.
    EmptyScopes,
    /// A string that grows in a slot.
    Strings,
    /// A vector of pointers.
    Vector,
    /// `break`, `continue` and `return` out of open scopes.
    Leave,
    /// An error return that closes nothing; the caller unwinds.
    Error,
    /// A tensor that grows by one in each step.
    Growth,
}

impl Pattern {
    /// All patterns.
    pub const ALL: [Self; 11] = [
        Self::Expression,
        Self::Call,
        Self::Graph,
        Self::Reassign,
        Self::Join,
        Self::EmptyScopes,
        Self::Strings,
        Self::Vector,
        Self::Leave,
        Self::Error,
        Self::Growth,
    ];
}

/// The mixes of the benchmark: patterns that the plain design can execute too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mix {
    /// Temporaries and joins.
    Expressions,
    /// Calls, strings, early returns.
    Calls,
    /// Graphs and reassignment.
    Objects,
    /// 5,000 empty scopes for each allocation, as in a real program.
    Scopes,
    /// All of these.
    Everything,
}

impl Mix {
    /// All mixes.
    pub const ALL: [Self; 5] =
        [Self::Expressions, Self::Calls, Self::Objects, Self::Scopes, Self::Everything];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Expressions => "mix: expressions",
            Self::Calls => "mix: calls and strings",
            Self::Objects => "mix: objects",
            Self::Scopes => "mix: empty scopes",
            Self::Everything => "mix: everything",
        }
    }

    /// The patterns in it.
    pub fn patterns(self) -> &'static [Pattern] {
        use Pattern::*;
        match self {
            Self::Expressions => &[Expression, Join],
            Self::Calls => &[Call, Strings],
            Self::Objects => &[Graph, Reassign],
            Self::Scopes => &[EmptyScopes],
            Self::Everything => &[Expression, Join, Call, Strings, Graph, Reassign, EmptyScopes],
        }
    }
}

/// Makes a program of at least `size` operations from `patterns`, with a compiler's bugs if `bugs`.
pub fn generate(seed: u64, size: usize, patterns: &[Pattern], bugs: bool) -> Program {
    let mut g = Generator {
        rng: Rng(seed),
        program: Program::default(),
        patterns: patterns.to_vec(),
        bugs,
        level: 0,
    };
    let start = g.mark();
    while g.program.ops.len() < size && !patterns.is_empty() {
        g.pattern();
    }
    // A program with bugs may leave scopes open: its caller cleans up.
    if bugs {
        g.program.ops.push(Op::Unwind(start));
    } else {
        g.program.ops.remove(0);
    }
    g.program
}

struct Generator {
    rng: Rng,
    program: Program,
    patterns: Vec<Pattern>,
    bugs: bool,
    level: u32,
}

impl Generator {
    fn emit(&mut self, op: Op) {
        self.program.ops.push(op);
        if self.bugs && self.rng.one_in(40) {
            let bug = match (self.rng.below(8), op) {
                (0, _) => Op::ReleaseUnknown,
                (1, _) => Op::Exit,
                (2, _) => Op::FunctionExit,
                (3, _) => Op::Buffer { slot: self.rng.below(200) as i64 - 100, size: 8 },
                (4, _) => Op::Buffer { slot: 0, size: -1 - self.rng.below(1 << 40) as i64 },
                (5, _) => Op::FunctionEnter(-(self.rng.below(1000) as i64) - 1),
                (_, Op::Release(v)) => {
                    // A temporary that is released twice around a reuse of its address.
                    let other = self.var();
                    self.program.ops.push(Op::New(other, What::Tensor));
                    Op::Release(v)
                }
                (_, Op::FunctionExit | Op::Exit) => {
                    self.program.ops.pop();
                    return;
                }
                (_, Op::New(v, _)) => Op::Promote(v),
                (_, Op::Use(v)) => Op::Unregister(v),
                _ => Op::Unwind(0),
            };
            self.program.ops.push(bug);
        }
    }

    fn var(&mut self) -> usize {
        self.program.vars += 1;
        self.program.vars - 1
    }

    fn mark(&mut self) -> usize {
        self.program.marks += 1;
        self.emit(Op::Mark(self.program.marks - 1));
        self.program.marks - 1
    }

    /// Returns whether programs may use operations that only the manager supports. The benchmark's
    /// mixes must run on the plain design too.
    fn full(&self) -> bool {
        self.patterns.contains(&Pattern::Leave)
    }

    fn what(&mut self) -> What {
        if self.rng.one_in(2) { What::Struct } else { What::Tensor }
    }

    fn new_object(&mut self) -> usize {
        let (var, what) = (self.var(), self.what());
        self.emit(Op::New(var, what));
        var
    }

    /// Moves `var` from the current scope to the parent, as compilers do, and closes the scope.
    fn hand_out(&mut self, var: usize, close: Op) {
        if self.full() && self.rng.one_in(2) {
            self.emit(Op::Promote(var));
            self.emit(close);
        } else {
            // Ownership moves to the program; then the outer scope takes it over.
            self.emit(Op::Unregister(var));
            self.emit(close);
            self.emit(Op::Register(var));
            self.emit(Op::Release(var));
        }
    }

    fn nested(&mut self) {
        if self.level < 4 && self.rng.one_in(2) {
            self.pattern();
        }
    }

    fn pattern(&mut self) {
        let pattern = self.patterns[self.rng.below(self.patterns.len() as u64) as usize];
        self.level += 1;
        match pattern {
            Pattern::Expression => self.expression(),
            Pattern::Call => self.call(),
            Pattern::Graph => self.graph(),
            Pattern::Reassign => self.reassign(),
            Pattern::Join => self.join(),
            Pattern::EmptyScopes => self.empty_scopes(),
            Pattern::Strings => self.strings(),
            Pattern::Vector => self.vector(),
            Pattern::Leave => self.leave(),
            Pattern::Error => self.error(),
            Pattern::Growth => self.growth(),
        }
        self.level -= 1;
    }

    /// An outer scope, which ends the objects that leave a pattern.
    fn scoped(&mut self, body: impl FnOnce(&mut Self)) {
        self.emit(Op::Enter);
        body(self);
        self.emit(Op::Exit);
    }

    fn expression(&mut self) {
        self.scoped(|g| {
            g.emit(Op::Enter);
            for _ in 0..g.rng.below(6) {
                let t = g.new_object();
                g.emit(Op::Use(t));
                if g.full() && g.rng.one_in(4) {
                    // A temporary that dies before its scope ends; the plain design would free its
                    // successor.
                    g.emit(Op::Release(t));
                }
            }
            g.nested();
            let result = g.new_object();
            g.hand_out(result, Op::Exit);
            g.emit(Op::Use(result));
        });
    }

    fn call(&mut self) {
        self.scoped(|g| {
            let argument = g.new_object();
            let slots = g.rng.below(5) as i64;
            g.emit(Op::FunctionEnter(slots));
            g.emit(Op::Acquire(argument));
            g.emit(Op::Use(argument));
            if slots > 0 {
                let slot = g.rng.below(slots as u64) as i64;
                g.emit(Op::Buffer { slot, size: g.program.ops.len() as i64 % 90 });
            }
            g.nested();
            g.emit(Op::Release(argument));
            let result = g.new_object();
            g.hand_out(result, Op::FunctionExit);
            g.emit(Op::Use(result));
            g.emit(Op::Use(argument));
        });
    }

    fn graph(&mut self) {
        self.scoped(|g| {
            let nodes: Vec<_> = (0..2 + g.rng.below(6)).map(|_| g.new_object()).collect();
            let mut edges = Vec::new();
            for _ in 0..g.rng.below(8) {
                let to = nodes[g.rng.below(nodes.len() as u64) as usize];
                g.emit(Op::Acquire(to));
                edges.push(to);
            }
            g.nested();
            // The compiler's code for the fields, before the structs are freed.
            for to in edges {
                g.emit(Op::Use(to));
                g.emit(Op::Release(to));
            }
        });
    }

    fn reassign(&mut self) {
        let (mut old, mut new) = (self.var(), self.var());
        let what = self.what();
        self.emit(Op::New(old, what));
        self.emit(Op::Unregister(old));
        for _ in 0..self.rng.below(8) {
            self.emit(Op::Enter);
            self.emit(Op::New(new, what));
            self.emit(Op::Use(old));
            self.emit(Op::Acquire(new));
            self.emit(Op::Release(old));
            self.emit(Op::Exit);
            std::mem::swap(&mut old, &mut new);
        }
        self.emit(Op::Use(old));
        self.emit(Op::Release(old));
    }

    fn join(&mut self) {
        self.scoped(|g| {
            let value = g.var();
            g.emit(Op::Enter);
            let what = g.what();
            if g.rng.one_in(2) {
                g.emit(Op::New(value, what));
                g.hand_out(value, Op::Exit);
            } else {
                let other = g.var();
                g.emit(Op::New(other, what));
                g.emit(Op::Use(other));
                g.emit(Op::Assign(other, value));
                g.hand_out(value, Op::Exit);
            }
            g.emit(Op::Use(value));
        });
    }

    fn empty_scopes(&mut self) {
        for _ in 0..100 {
            self.emit(Op::Enter);
            self.emit(Op::Enter);
            self.emit(Op::Exit);
            self.emit(Op::Exit);
        }
    }

    fn strings(&mut self) {
        self.emit(Op::FunctionEnter(2));
        let mut size = 1 + self.rng.below(30) as i64;
        for _ in 0..1 + self.rng.below(8) {
            self.emit(Op::Buffer { slot: self.program.ops.len() as i64 % 2, size });
            size += 1 + self.rng.below(size as u64) as i64;
        }
        self.nested();
        self.emit(Op::FunctionExit);
    }

    fn vector(&mut self) {
        self.scoped(|g| {
            let vec = g.var();
            g.emit(Op::NewVec(vec));
            for _ in 0..g.rng.below(10) {
                let element = g.var();
                g.emit(Op::Enter);
                if g.rng.one_in(4) {
                    g.emit(Op::NewVec(element));
                } else {
                    g.emit(Op::New(element, What::Tensor));
                }
                g.emit(Op::Push(vec, element));
                g.emit(Op::Exit);
                g.emit(Op::Use(element));
            }
            g.nested();
        });
    }

    fn leave(&mut self) {
        self.emit(Op::FunctionEnter(1));
        for _ in 0..self.rng.below(5) {
            self.emit(Op::Enter);
            self.new_object();
            if self.rng.one_in(3) {
                self.emit(Op::Exit);
            }
        }
        self.emit(Op::FunctionExit);
    }

    fn error(&mut self) {
        let mark = self.mark();
        for _ in 0..1 + self.rng.below(3) {
            self.emit(Op::FunctionEnter(1));
            self.emit(Op::Buffer { slot: 0, size: 20 });
            self.emit(Op::Enter);
            self.new_object();
        }
        self.nested();
        self.emit(Op::Unwind(mark));
    }

    fn growth(&mut self) {
        let (mut old, mut new) = (self.var(), self.var());
        self.emit(Op::New(old, What::Tensor));
        self.emit(Op::Unregister(old));
        for _ in 0..self.rng.below(20) {
            self.emit(Op::Enter);
            self.emit(Op::New(new, What::Tensor));
            self.emit(Op::Use(old));
            self.emit(Op::Unregister(new));
            self.emit(Op::Release(old));
            self.emit(Op::Exit);
            std::mem::swap(&mut old, &mut new);
        }
        self.emit(Op::Release(old));
    }
}
