/* leasehold.hpp: the runtime of a device for C++17. Header only, over leasehold_runtime.h, whose rules hold here; there is no ABI of C++.
 *
 *     leasehold::device device("cpu:0");
 *     leasehold::runtime runtime(device);
 *     leasehold::stream stream = runtime.create_stream();
 *     leasehold::buffer x = stream.upload(std::vector<float>{1, 2, 3});
 *     std::vector<float> back = stream.download<float>(x);
 *
 *  - An object holds one handle: a copy adds a holder, a move takes it along, the destructor releases it. Of a moved-from object only the
 *    destructor, an assignment and `if (object)` are right. device and runtime are moved only.
 *  - A failure is a leasehold::error with the status and the text. Destructors throw nothing. An object may be used by several threads, as its
 *    handle may; to change one object while another thread uses it is a race, as with any value.
 *  - A function of the caller is any callable. It may throw: the exception ends there, and the stream fails, or the launch is refused. A
 *    kernel's C function is a plain function, and may not throw.
 */
#ifndef LEASEHOLD_HPP
#define LEASEHOLD_HPP

#include "leasehold_runtime.h"

#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace leasehold {

/* A status that is not LEASEHOLD_OK. */
class error : public std::runtime_error {
  public:
    error(int status, const std::string &text) : std::runtime_error(text), status_(status) {}
    int status() const noexcept { return status_; }

  private:
    int status_;
};

/* Throws what a function of the C API says. */
inline void check(int status) {
    if (status != LEASEHOLD_OK) {
        throw error(status, leasehold_last_error());
    }
}

/* A limit of time; without one a wait has none. */
class limit {
  public:
    limit() = default;
    template <class Rep, class Period>
    limit(std::chrono::duration<Rep, Period> time)
        : nanoseconds_(time.count() < 0 ? 0 : static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(time).count())) {}
    std::uint64_t nanoseconds() const noexcept { return nanoseconds_; }

  private:
    std::uint64_t nanoseconds_ = LEASEHOLD_FOREVER;
};

using point = leasehold_point;

namespace detail {

/* A counted handle. */
template <int (*Retain)(std::uint64_t), int (*Release)(std::uint64_t)>
class handle {
  public:
    handle() = default;
    /* Takes over a handle that the caller holds. */
    explicit handle(std::uint64_t taken) noexcept : handle_(taken) {}
    handle(const handle &other) : handle_(other.handle_) {
        if (handle_ != 0) {
            check(Retain(handle_));
        }
    }
    handle(handle &&other) noexcept : handle_(std::exchange(other.handle_, 0)) {}
    handle &operator=(handle other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~handle() {
        if (handle_ != 0) {
            Release(handle_);
        }
    }

    /* The handle, for functions of C; it stays this object's. */
    std::uint64_t get() const noexcept { return handle_; }
    explicit operator bool() const noexcept { return handle_ != 0; }

  private:
    std::uint64_t handle_ = 0;
};

template <class Function> void destroy(void *function) noexcept { delete static_cast<Function *>(function); }

/* Calls `call` with a copy of a function on the heap, which is the library's if that succeeds. */
template <class Function, class Call> void give(Function &&function, Call &&call) {
    using Kept = std::decay_t<Function>;
    auto kept = std::make_unique<Kept>(std::forward<Function>(function));
    check(call(static_cast<void *>(kept.get())));
    kept.release();
}

/* The description of an object, by a struct that begins with its size. */
template <class Info> Info described(int (*describe)(std::uint64_t, Info *), std::uint64_t handle) {
    Info info{};
    info.size = sizeof info;
    check(describe(handle, &info));
    return info;
}

/* The status of a function of the caller's: a failure for an exception. */
template <class Call> int guarded(Call &&call) noexcept {
    try {
        call();
        return 0;
    } catch (...) {
        return 1;
    }
}

} // namespace detail

/* ---- buffers ---- */

class buffer;

/* A part of a buffer, and what an operation does with it: borrows the buffer. */
struct operand {
    leasehold_operand part;
};

class buffer : public detail::handle<leasehold_buffer_retain, leasehold_buffer_release> {
  public:
    using handle::handle;

    leasehold_buffer_info describe() const { return detail::described(leasehold_buffer_describe, get()); }
    std::uint64_t size() const { return describe().bytes; }
    /* The address on the device; that of the host's memory for a pinned buffer, and on a CPU. */
    void *address() const { return reinterpret_cast<void *>(static_cast<std::uintptr_t>(describe().address)); }
    void set_name(const std::string &name) const { check(leasehold_buffer_set_name(get(), name.c_str())); }

    operand with(std::uint32_t access, std::uint64_t offset = 0, std::uint64_t bytes = LEASEHOLD_WHOLE) const noexcept {
        return {{get(), offset, bytes, access, 0}};
    }
    operand read(std::uint64_t offset = 0, std::uint64_t bytes = LEASEHOLD_WHOLE) const noexcept { return with(LEASEHOLD_READ, offset, bytes); }
    operand write(std::uint64_t offset = 0, std::uint64_t bytes = LEASEHOLD_WHOLE) const noexcept { return with(LEASEHOLD_WRITE, offset, bytes); }
    operand read_write(std::uint64_t offset = 0, std::uint64_t bytes = LEASEHOLD_WHOLE) const noexcept {
        return with(LEASEHOLD_READ_WRITE, offset, bytes);
    }
};

/* ---- events, kernels, host timelines ---- */

class event : public detail::handle<leasehold_event_retain, leasehold_event_release> {
  public:
    using handle::handle;

    bool query() const {
        int over = 0;
        check(leasehold_event_query(get(), &over));
        return over != 0;
    }
    void synchronize(limit time = {}) const { check(leasehold_event_synchronize(get(), time.nanoseconds())); }
    /* The device's time from another event's last record. Blocks until both are over. */
    std::chrono::nanoseconds elapsed_since(const event &start) const {
        std::uint64_t nanoseconds = 0;
        check(leasehold_event_elapsed_blocking(start.get(), get(), &nanoseconds));
        return std::chrono::nanoseconds(static_cast<std::int64_t>(nanoseconds));
    }
    leasehold::point last() const {
        leasehold::point found{};
        check(leasehold_event_point(get(), &found));
        return found;
    }
};

class host_timeline : public detail::handle<leasehold_host_timeline_retain, leasehold_host_timeline_release> {
  public:
    using handle::handle;

    leasehold::point next() const {
        leasehold::point found{};
        check(leasehold_host_timeline_next(get(), &found));
        return found;
    }
    void signal(std::uint64_t value) const { check(leasehold_host_timeline_signal(get(), value)); }
    void fail(const std::string &why) const { check(leasehold_host_timeline_fail(get(), why.c_str())); }
};

/* The blocks of a launch, and the threads of each. */
struct grid {
    grid(std::uint32_t blocks, std::uint32_t threads = 1, std::uint32_t shared_bytes = 0) noexcept
        : shape{{blocks, 1, 1}, {threads, 1, 1}, shared_bytes, 0} {}
    grid(std::array<std::uint32_t, 3> blocks, std::array<std::uint32_t, 3> threads, std::uint32_t shared_bytes = 0) noexcept
        : shape{{blocks[0], blocks[1], blocks[2]}, {threads[0], threads[1], threads[2]}, shared_bytes, 0} {}
    leasehold_grid shape;
};

class runtime;

class kernel : public detail::handle<leasehold_kernel_retain, leasehold_kernel_release> {
  public:
    using handle::handle;

    /* A kernel in the making. `define` is where the caller vouches for the code: see leasehold_kernel_define. */
    class builder {
      public:
        explicit builder(std::string name) : name_(std::move(name)) {}

        builder &c_function(void (*function)(const leasehold_tile *)) {
            leasehold_kernel_source source{};
            source.kind = LEASEHOLD_SOURCE_C_FUNCTION;
            source.function = function;
            return add(source, {}, {});
        }
        builder &cuda_c(std::string text, std::vector<std::string> options = {}) {
            leasehold_kernel_source source{};
            source.kind = LEASEHOLD_SOURCE_CUDA_C;
            return add(source, std::move(text), std::move(options));
        }
        builder &ptx(std::string text) {
            leasehold_kernel_source source{};
            source.kind = LEASEHOLD_SOURCE_PTX;
            return add(source, std::move(text), {});
        }
        /* For the future: this library has no Metal devices yet. */
        builder &msl(std::string text) {
            leasehold_kernel_source source{};
            source.kind = LEASEHOLD_SOURCE_MSL;
            return add(source, std::move(text), {});
        }
        /* Machine code for a compute capability, as 90. */
        builder &cubin(std::string image, std::uint32_t capability) {
            leasehold_kernel_source source{};
            source.kind = LEASEHOLD_SOURCE_CUBIN;
            source.capability = capability;
            return add(source, std::move(image), {});
        }
        builder &reads(std::size_t count = 1) { return bind(LEASEHOLD_READ, count); }
        builder &writes(std::size_t count = 1) { return bind(LEASEHOLD_WRITE, count); }
        builder &read_writes(std::size_t count = 1) { return bind(LEASEHOLD_READ_WRITE, count); }
        template <class P> builder &params() {
            static_assert(std::is_trivially_copyable_v<P>, "parameters are plain bytes");
            params_ = sizeof(P);
            return *this;
        }
        /* The parameters have a leasehold_tensor_map of a binding at an offset. */
        builder &map(std::uint32_t binding, std::uint32_t offset) {
            maps_.push_back({binding, offset});
            return *this;
        }
        /* A launch is made of clusters of so many blocks. */
        builder &cluster(std::array<std::uint32_t, 3> blocks) {
            cluster_ = blocks;
            return *this;
        }
        /* All blocks of a launch run at the same time; see resident_blocks. */
        builder &cooperative() {
            flags_ |= LEASEHOLD_KERNEL_COOPERATIVE;
            return *this;
        }
        /* The code waits itself for the kernels in front of it, and may read these bindings before it does. */
        builder &dependent_launch(std::initializer_list<std::uint32_t> early_reads = {}) {
            flags_ |= LEASEHOLD_KERNEL_DEPENDENT;
            for (std::uint32_t binding : early_reads) {
                early_ |= 1u << (binding < 31 ? binding : 31);
            }
            return *this;
        }
        builder &aligned(std::uint32_t bytes) {
            alignment_ = bytes;
            return *this;
        }
        builder &overlap(std::uint32_t rule) {
            overlap_ = rule;
            return *this;
        }
        /* A launch runs if this returns true; it refuses one by an exception too. Called by several threads at a time. */
        builder &check(std::function<bool(const leasehold_launch_info &)> accepts) {
            accepts_ = std::move(accepts);
            return *this;
        }

        kernel define() const {
            std::vector<leasehold_kernel_source> sources;
            std::vector<std::vector<const char *>> options(sources_.size());
            for (std::size_t i = 0; i < sources_.size(); i++) {
                leasehold_kernel_source source = sources_[i].source;
                for (const std::string &option : sources_[i].options) {
                    options[i].push_back(option.c_str());
                }
                source.code = sources_[i].code.data();
                source.code_bytes = sources_[i].code.size();
                source.options = options[i].data();
                source.option_count = options[i].size();
                sources.push_back(source);
            }
            leasehold_kernel_desc desc{};
            desc.size = sizeof desc;
            desc.name = name_.c_str();
            desc.sources = sources.data();
            desc.source_count = sources.size();
            desc.access = access_.data();
            desc.binding_count = access_.size();
            desc.params_bytes = params_;
            desc.alignment = alignment_;
            desc.overlap = overlap_;
            desc.maps = maps_.data();
            desc.map_count = maps_.size();
            desc.flags = flags_;
            desc.early_reads = early_;
            std::memcpy(desc.cluster, cluster_.data(), sizeof desc.cluster);
            leasehold_kernel made = 0;
            if (!accepts_) {
                leasehold::check(leasehold_kernel_define(&desc, &made));
                return kernel(made);
            }
            using Accepts = std::function<bool(const leasehold_launch_info &)>;
            desc.check = [](void *accepts, const leasehold_launch_info *launch) -> int {
                bool accepted = false;
                const int failed = detail::guarded([&] { accepted = (*static_cast<Accepts *>(accepts))(*launch); });
                return failed != 0 || !accepted;
            };
            desc.release = detail::destroy<Accepts>;
            detail::give(accepts_, [&](void *accepts) {
                desc.context = accepts;
                return leasehold_kernel_define(&desc, &made);
            });
            return kernel(made);
        }

      private:
        struct code {
            leasehold_kernel_source source;
            std::string code;
            std::vector<std::string> options;
        };

        builder &add(leasehold_kernel_source source, std::string text, std::vector<std::string> options) {
            sources_.push_back({source, std::move(text), std::move(options)});
            return *this;
        }
        builder &bind(std::uint32_t access, std::size_t count) {
            access_.insert(access_.end(), count, access);
            return *this;
        }

        std::string name_;
        std::vector<code> sources_;
        std::vector<std::uint32_t> access_;
        std::vector<leasehold_map_place> maps_;
        std::array<std::uint32_t, 3> cluster_{};
        std::uint32_t params_ = 0, alignment_ = 0, overlap_ = LEASEHOLD_OVERLAP_REFUSED, flags_ = 0, early_ = 0;
        std::function<bool(const leasehold_launch_info &)> accepts_;
    };

    void prepare(const runtime &on) const;
    std::uint64_t resident_blocks(const runtime &on, std::uint32_t threads, std::uint32_t shared_bytes = 0) const;
};

/* ---- streams ---- */

class stream : public detail::handle<leasehold_stream_retain, leasehold_stream_release> {
  public:
    using handle::handle;

    /* Device memory for first use on this stream. */
    buffer alloc(std::uint64_t bytes) const {
        leasehold_buffer made = 0;
        check(leasehold_buffer_alloc(get(), bytes, &made));
        return buffer(made);
    }
    /* Pinned host memory. */
    buffer alloc_pinned(std::uint64_t bytes) const {
        leasehold_buffer made = 0;
        check(leasehold_buffer_alloc_pinned(get(), bytes, &made));
        return buffer(made);
    }

    leasehold::point copy(const operand &to, const operand &from) const {
        return at([&](leasehold::point *p) { return leasehold_stream_copy(get(), to.part, from.part, p); });
    }
    leasehold::point copy(const buffer &to, const buffer &from) const { return copy(to.write(), from.read()); }
    leasehold::point copy_rows(const operand &to, const operand &from, const leasehold_rows &rows) const {
        return at([&](leasehold::point *p) { return leasehold_stream_copy_rows(get(), to.part, from.part, &rows, p); });
    }
    /* Fills with a number of 1, 2 or 4 bytes. */
    template <class T> leasehold::point fill(const operand &to, T value) const {
        static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4), "a number of 1, 2 or 4 bytes");
        using Bits = std::conditional_t<sizeof(T) == 1, std::uint8_t, std::conditional_t<sizeof(T) == 2, std::uint16_t, std::uint32_t>>;
        Bits bits = 0;
        std::memcpy(&bits, &value, sizeof(T));
        return at([&](leasehold::point *p) { return leasehold_stream_fill(get(), to.part, bits, sizeof(T), p); });
    }
    template <class T> leasehold::point fill(const buffer &to, T value) const { return fill(to.write(), value); }

    /* Copies values to the device; they are taken during the call. */
    template <class T> leasehold::point upload(const operand &to, const T *values, std::size_t count) const {
        static_assert(std::is_trivially_copyable_v<T>, "values are copied as bytes");
        return at([&](leasehold::point *p) { return leasehold_stream_upload(get(), to.part, values, count * sizeof(T), p); });
    }
    /* A new buffer with these values. */
    template <class T> buffer upload(const std::vector<T> &values) const {
        buffer made = alloc(values.size() * sizeof(T));
        upload(made.write(), values.data(), values.size());
        return made;
    }
    /* The values of a part of a buffer. Blocks until they are there. */
    template <class T> std::vector<T> download(const operand &from) const {
        static_assert(std::is_trivially_copyable_v<T>, "values are copied as bytes");
        const auto info = detail::described(leasehold_buffer_describe, from.part.buffer);
        const std::uint64_t room = info.bytes < from.part.offset ? 0 : info.bytes - from.part.offset;
        std::vector<T> values(static_cast<std::size_t>((from.part.bytes == LEASEHOLD_WHOLE ? room : from.part.bytes) / sizeof(T)));
        check(leasehold_stream_download_blocking(get(), values.data(), values.size() * sizeof(T), from.part));
        return values;
    }
    template <class T> std::vector<T> download(const buffer &from) const { return download<T>(from.read()); }

    leasehold::point launch(const kernel &kernel, const grid &grid, std::initializer_list<operand> operands) const {
        return launch_bytes(kernel, grid, operands, nullptr, 0);
    }
    template <class P>
    leasehold::point launch(const kernel &kernel, const grid &grid, std::initializer_list<operand> operands, const P &params) const {
        static_assert(std::is_trivially_copyable_v<P>, "parameters are plain bytes");
        return launch_bytes(kernel, grid, operands, &params, sizeof(P));
    }

    /* Runs a function on the host, in stream order; at each launch if it is recorded. An exception fails the stream. */
    template <class Function> leasehold::point host_call(Function &&function) const {
        using Kept = std::decay_t<Function>;
        leasehold::point p{};
        detail::give(std::forward<Function>(function), [&](void *kept) {
            auto call = [](void *context) -> int { return detail::guarded([&] { (*static_cast<Kept *>(context))(); }); };
            return leasehold_stream_host_call(get(), call, detail::destroy<Kept>, kept, &p);
        });
        return p;
    }
    /* Runs a function that enqueues work on the native stream and touches the operands alone: void(uintptr_t, const leasehold_binding *, size_t).
     * In a recording with CUDA it is called and captured when the graph is instantiated, and by no launch. On the CPU each launch calls it. */
    template <class Function> leasehold::point foreign_call(std::initializer_list<operand> operands, Function &&function) const {
        using Kept = std::decay_t<Function>;
        leasehold::point p{};
        detail::give(std::forward<Function>(function), [&](void *kept) {
            auto call = [](void *context, std::uintptr_t native, const leasehold_binding *bindings, std::size_t count) -> int {
                return detail::guarded([&] { (*static_cast<Kept *>(context))(native, bindings, count); });
            };
            return leasehold_stream_foreign_call(get(), list(operands), operands.size(), call, detail::destroy<Kept>, kept, &p);
        });
        return p;
    }
    /* Calls a function of the status once, when all work so far is over. What it throws is lost. */
    template <class Function> void on_complete(Function &&function) const {
        using Kept = std::decay_t<Function>;
        detail::give(std::forward<Function>(function), [&](void *kept) {
            auto call = [](void *context, int status) {
                std::unique_ptr<Kept> owned(static_cast<Kept *>(context));
                (void)detail::guarded([&] { (*owned)(status); });
            };
            return leasehold_stream_on_complete(get(), call, kept);
        });
    }

    leasehold::point record(const event &event) const {
        return at([&](leasehold::point *p) { return leasehold_event_record(event.get(), get(), p); });
    }
    void wait(const leasehold::point &p) const { check(leasehold_stream_wait_point(get(), p)); }
    void wait(const event &event) const { check(leasehold_stream_wait_event(get(), event.get())); }
    /* Orders this stream behind, or before, a stream of another library: leasehold_stream_wait_native, leasehold_stream_precede_native. */
    void wait_native(std::uintptr_t native) const { check(leasehold_stream_wait_native(get(), native)); }
    void precede_native(std::uintptr_t native) const { check(leasehold_stream_precede_native(get(), native)); }
    leasehold::point now() const {
        return at([&](leasehold::point *p) { return leasehold_stream_now(get(), p); });
    }
    bool query() const {
        int over = 0;
        check(leasehold_stream_query(get(), &over));
        return over != 0;
    }
    void synchronize(limit time = {}) const { check(leasehold_stream_synchronize(get(), time.nanoseconds())); }
    void flush() const { check(leasehold_stream_flush(get())); }
    std::uintptr_t native() const {
        std::uintptr_t found = 0;
        check(leasehold_stream_native(get(), &found));
        return found;
    }
    void set_name(const std::string &name) const { check(leasehold_stream_set_name(get(), name.c_str())); }
    /* The number of the operation that is recorded next. */
    std::uint32_t next_node() const {
        std::uint32_t node = 0;
        check(leasehold_record_next(get(), &node));
        return node;
    }

  private:
    template <class Call> leasehold::point at(Call &&call) const {
        leasehold::point p{};
        check(call(&p));
        return p;
    }
    static const leasehold_operand *list(std::initializer_list<operand> operands) noexcept {
        static_assert(sizeof(operand) == sizeof(leasehold_operand) && std::is_standard_layout_v<operand>, "a list of the C API's operands");
        return reinterpret_cast<const leasehold_operand *>(operands.begin());
    }
    leasehold::point launch_bytes(const kernel &kernel, const grid &grid, std::initializer_list<operand> operands, const void *params,
                                  std::size_t bytes) const {
        return at([&](leasehold::point *p) {
            return leasehold_stream_launch(get(), kernel.get(), &grid.shape, list(operands), operands.size(), params, bytes, p);
        });
    }
};

/* ---- graphs ---- */

class graph : public detail::handle<leasehold_graph_retain, leasehold_graph_release> {
  public:
    using handle::handle;

    leasehold::point launch(const stream &on) const {
        leasehold::point p{};
        check(leasehold_graph_launch(get(), on.get(), &p));
        return p;
    }
    leasehold_graph_info describe() const { return detail::described(leasehold_graph_describe, get()); }
    /* The operations of a launch, as JSON. */
    std::string nodes() const {
        char *json = nullptr;
        check(leasehold_graph_nodes(get(), &json));
        std::unique_ptr<char, void (*)(char *)> owned(json, leasehold_text_free);
        return json;
    }
    /* Changes the graph for later launches, all or nothing. Returns whether it had to be instantiated again. */
    bool update(std::initializer_list<leasehold_graph_change> changes) const {
        int again = 0;
        check(leasehold_graph_update(get(), changes.begin(), changes.size(), &again));
        return again != 0;
    }
    template <class P> static leasehold_graph_change params(std::uint32_t node, const P &params) noexcept {
        static_assert(std::is_trivially_copyable_v<P>, "parameters are plain bytes");
        leasehold_graph_change change{};
        change.kind = LEASEHOLD_CHANGE_PARAMS;
        change.node = node;
        change.params = &params;
        change.params_bytes = sizeof(P);
        return change;
    }
    static leasehold_graph_change replace(const buffer &from, const buffer &to) noexcept {
        leasehold_graph_change change{};
        change.kind = LEASEHOLD_CHANGE_BUFFER;
        change.from = from.get();
        change.to = to.get();
        return change;
    }
};

/* ---- devices and runtimes ---- */

class device {
  public:
    explicit device(const std::string &name, const leasehold_device_options *options = nullptr) {
        check(leasehold_device_open(name.c_str(), options, &handle_));
    }
    device(device &&other) noexcept : handle_(std::exchange(other.handle_, 0)) {}
    device &operator=(device &&other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~device() {
        if (handle_ != 0) {
            leasehold_device_close(handle_);
        }
    }
    leasehold_device get() const noexcept { return handle_; }

  private:
    leasehold_device handle_ = 0;
};

/* The runtime of a device. The device object outlives the runtime. The destructor waits for the device's work. */
class runtime {
  public:
    explicit runtime(const device &device) { check(leasehold_runtime_open(device.get(), &handle_)); }
    runtime(runtime &&other) noexcept : handle_(std::exchange(other.handle_, 0)) {}
    runtime &operator=(runtime &&other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~runtime() {
        if (handle_ != 0) {
            leasehold_runtime_close(handle_, LEASEHOLD_FOREVER);
        }
    }
    leasehold_runtime get() const noexcept { return handle_; }

    /* Waits for all work, and closes the runtime; to be told of failures. */
    void close(limit time = {}) {
        const int status = leasehold_runtime_close(handle_, time.nanoseconds());
        if (status != LEASEHOLD_TIMEOUT) {
            handle_ = 0;
        }
        check(status);
    }
    void synchronize(limit time = {}) const { check(leasehold_runtime_synchronize(handle_, time.nanoseconds())); }
    /* A trace of all streams, from here to trace_stop, which writes it for ui.perfetto.dev. */
    void trace_start() const { check(leasehold_trace_start(handle_)); }
    void trace_stop(const std::string &path, limit time = {}) const {
        check(leasehold_trace_stop(handle_, path.c_str(), time.nanoseconds()));
    }
    leasehold_runtime_info describe() const { return detail::described(leasehold_runtime_describe, handle_); }
    leasehold::stream default_stream() const {
        leasehold_stream found = 0;
        check(leasehold_runtime_stream(handle_, &found));
        return leasehold::stream(found);
    }
    leasehold::stream create_stream(const std::string &name = {}, int priority = 0) const {
        leasehold_stream_options options{};
        options.size = sizeof options;
        options.name = name.empty() ? nullptr : name.c_str();
        options.priority = priority;
        leasehold_stream made = 0;
        check(leasehold_stream_create(handle_, &options, &made));
        return leasehold::stream(made);
    }
    event create_event(std::uint32_t flags = LEASEHOLD_EVENT_TIMING) const {
        leasehold_event made = 0;
        check(leasehold_event_create(handle_, flags, &made));
        return event(made);
    }
    host_timeline create_host_timeline() const {
        leasehold_host_timeline made = 0;
        check(leasehold_host_timeline_create(handle_, &made));
        return host_timeline(made);
    }
    /* Makes a buffer of memory of the caller's: leasehold_buffer_wrap. `done` is called once, when nothing uses it any more. */
    template <class Function> buffer wrap(void *address, std::uint64_t bytes, Function &&done, std::uint32_t flags = 0) const {
        using Kept = std::decay_t<Function>;
        leasehold_wrap_desc desc{};
        desc.size = sizeof desc;
        desc.address = reinterpret_cast<std::uintptr_t>(address);
        desc.bytes = bytes;
        desc.flags = flags;
        desc.release = [](void *context) {
            std::unique_ptr<Kept> owned(static_cast<Kept *>(context));
            (void)detail::guarded([&] { (*owned)(); });
        };
        leasehold_buffer made = 0;
        detail::give(std::forward<Function>(done), [&](void *kept) {
            desc.context = kept;
            return leasehold_buffer_wrap(handle_, &desc, &made);
        });
        return buffer(made);
    }
    /* A graph of what a function does with the stream that it is lent; what it does with other streams runs at once. */
    template <class Function> graph record(Function &&function) const {
        leasehold_stream begun = 0;
        check(leasehold_record_begin(handle_, &begun));
        const leasehold::stream recorded(begun);
        try {
            std::forward<Function>(function)(recorded);
        } catch (...) {
            leasehold_record_cancel(begun);
            throw;
        }
        leasehold_graph made = 0;
        const int status = leasehold_record_end(begun, &made);
        check(status);
        return graph(made);
    }
    void wait_all(const std::vector<leasehold::point> &points, limit time = {}) const {
        check(leasehold_wait_all(handle_, points.data(), points.size(), time.nanoseconds()));
    }
    std::size_t wait_any(const std::vector<leasehold::point> &points, limit time = {}) const {
        std::size_t which = 0;
        check(leasehold_wait_any(handle_, points.data(), points.size(), time.nanoseconds(), &which));
        return which;
    }

  private:
    leasehold_runtime handle_ = 0;
};

/* ---- ranks ---- */

/* The number of a type of elements; half-precision numbers are LEASEHOLD_F16 and LEASEHOLD_BF16. */
template <class T> constexpr std::uint32_t element_of() {
    static_assert(std::is_arithmetic_v<T> && !std::is_same_v<T, bool> && sizeof(T) <= 8, "a number of up to 64 bits");
    if constexpr (std::is_floating_point_v<T>) {
        return sizeof(T) == 4 ? LEASEHOLD_F32 : LEASEHOLD_F64;
    } else {
        constexpr std::uint32_t row = sizeof(T) == 1 ? LEASEHOLD_I8 : sizeof(T) == 2 ? LEASEHOLD_I16 : sizeof(T) == 4 ? LEASEHOLD_I32 : LEASEHOLD_I64;
        return row + (std::is_unsigned_v<T> ? 1 : 0);
    }
}

/* Calls of all ranks, for comm::call. */
namespace collective {

inline leasehold_collective make(std::uint32_t call, std::uint32_t element, std::uint32_t reduce, std::uint32_t rank, const operand &to,
                                 const operand &from) noexcept {
    return {call, element, reduce, rank, to.part, from.part};
}
template <class T> leasehold_collective all_reduce(const buffer &x, std::uint32_t reduce = LEASEHOLD_SUM) noexcept {
    return make(LEASEHOLD_ALL_REDUCE, element_of<T>(), reduce, 0, x.read_write(), {});
}
template <class T> leasehold_collective all_gather(const operand &to, const operand &from) noexcept {
    return make(LEASEHOLD_ALL_GATHER, element_of<T>(), 0, 0, to, from);
}
template <class T> leasehold_collective reduce_scatter(const operand &to, const operand &from, std::uint32_t reduce = LEASEHOLD_SUM) noexcept {
    return make(LEASEHOLD_REDUCE_SCATTER, element_of<T>(), reduce, 0, to, from);
}
template <class T> leasehold_collective all_to_all(const operand &to, const operand &from) noexcept {
    return make(LEASEHOLD_ALL_TO_ALL, element_of<T>(), 0, 0, to, from);
}
template <class T> leasehold_collective broadcast(const buffer &x, std::uint32_t root) noexcept {
    return make(LEASEHOLD_BROADCAST, element_of<T>(), 0, root, x.read_write(), {});
}
template <class T> leasehold_collective reduce(const buffer &x, std::uint32_t root, std::uint32_t how = LEASEHOLD_SUM) noexcept {
    return make(LEASEHOLD_REDUCE, element_of<T>(), how, root, x.read_write(), {});
}
template <class T> leasehold_collective send(const operand &from, std::uint32_t to) noexcept {
    return make(LEASEHOLD_SEND, element_of<T>(), 0, to, {}, from);
}
template <class T> leasehold_collective recv(const operand &to, std::uint32_t from) noexcept {
    return make(LEASEHOLD_RECV, element_of<T>(), 0, from, to, {});
}
inline leasehold_collective barrier() noexcept { return make(LEASEHOLD_BARRIER, 0, 0, 0, {}, {}); }

} // namespace collective

class comm : public detail::handle<leasehold_comm_retain, leasehold_comm_release> {
  public:
    using handle::handle;

    leasehold_comm_info describe() const { return detail::described(leasehold_comm_describe, get()); }
    /* LEASEHOLD_OK, or the status of what ended the communicator. */
    int failure() const {
        int status = LEASEHOLD_OK;
        check(leasehold_comm_failure(get(), &status));
        return status;
    }
    /* A communicator for the ranks of this color; false for LEASEHOLD_NO_COLOR. */
    comm split(std::uint32_t color, std::int32_t key = 0) const {
        leasehold_comm part = 0;
        check(leasehold_comm_split(get(), color, key, &part));
        return comm(part);
    }
    comm shrink(const std::vector<std::uint32_t> &lost) const {
        leasehold_comm rest = 0;
        check(leasehold_comm_shrink(get(), lost.data(), lost.size(), &rest));
        return comm(rest);
    }
    void abort(const std::string &why) const { check(leasehold_comm_abort(get(), why.c_str())); }
    /* Makes calls together with the other ranks: one, or a group. */
    leasehold::point call(const stream &on, std::initializer_list<leasehold_collective> calls) const {
        leasehold::point p{};
        check(leasehold_comm_call(get(), on.get(), calls.begin(), calls.size(), &p));
        return p;
    }
};

class world : public detail::handle<leasehold_world_retain, leasehold_world_release> {
  public:
    using handle::handle;

    /* The world of a launcher: torchrun, mpirun, Slurm. */
    static world open() {
        leasehold_world opened = 0;
        check(leasehold_world_open(&opened));
        return world(opened);
    }
    /* A world for each of some ranks that are threads. */
    static std::vector<world> threads(std::uint32_t count) {
        std::vector<leasehold_world> opened(count);
        check(leasehold_world_open_threads(count, opened.data()));
        return std::vector<world>(opened.begin(), opened.end());
    }
    leasehold_world_info describe() const { return detail::described(leasehold_world_describe, get()); }
    /* The work of each rank, for people. */
    std::string report(limit time) const {
        char *text = nullptr;
        check(leasehold_world_report(get(), time.nanoseconds(), &text));
        std::unique_ptr<char, void (*)(char *)> owned(text, leasehold_text_free);
        return text;
    }
    comm create_comm(const runtime &on, const std::string &name, limit time = std::chrono::minutes(5), std::uint32_t flags = 0) const {
        leasehold_comm_desc desc{};
        desc.size = sizeof desc;
        desc.name = name.c_str();
        desc.timeout_ns = time.nanoseconds();
        desc.flags = flags;
        leasehold_comm made = 0;
        check(leasehold_comm_create(get(), on.get(), &desc, &made));
        return comm(made);
    }
    /* Ends this rank in order, once all ranks have come to it, and lets go of the world. */
    void close(limit time) {
        check(leasehold_world_retain(get()));
        const int status = leasehold_world_close(get(), time.nanoseconds());
        if (status == LEASEHOLD_TIMEOUT) {
            leasehold_world_release(get());
        } else {
            *this = world();
        }
        check(status);
    }
};

inline void kernel::prepare(const runtime &on) const { check(leasehold_kernel_prepare(get(), on.get())); }

inline std::uint64_t kernel::resident_blocks(const runtime &on, std::uint32_t threads, std::uint32_t shared_bytes) const {
    std::uint64_t blocks = 0;
    check(leasehold_kernel_resident_blocks(get(), on.get(), threads, shared_bytes, &blocks));
    return blocks;
}

} // namespace leasehold

#endif
