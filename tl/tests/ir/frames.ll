; Functions with frames as a compiler emits them: recursion with a slot each, a string that grows in a slot, a method that forgets
; function_exit, an early return out of open scopes. Returns the number of things that were wrong.
declare void @tl_mem_enter_scope()
declare void @tl_mem_exit_scope()
declare void @tl_mem_function_enter(i64)
declare void @tl_mem_function_exit_notail()
declare ptr @tl_mem_get_buffer(i64, i64)
declare void @tl_mem_register_struct(ptr)
declare void @tl_mem_unregister(ptr)
declare i64 @tl_get_scope_depth()
declare i64 @tl_get_object_count()
declare ptr @malloc(i64)
declare void @tl_ptr_release(ptr)

; fib by recursion; each activation keeps its intermediate result in its own slot across the calls.
define i64 @fib(i64 %n) noinline {
entry:
  call void @tl_mem_function_enter(i64 1)
  %small = icmp slt i64 %n, 2
  br i1 %small, label %base, label %rec
base:
  notail call void @tl_mem_function_exit_notail()
  ret i64 %n
rec:
  %n1 = sub i64 %n, 1
  %a = call i64 @fib(i64 %n1)
  %slot = call ptr @tl_mem_get_buffer(i64 0, i64 8)
  store i64 %a, ptr %slot
  %n2 = sub i64 %n, 2
  %b = call i64 @fib(i64 %n2)
  %again = call ptr @tl_mem_get_buffer(i64 0, i64 8)
  %kept = load i64, ptr %again
  %sum = add i64 %kept, %b
  notail call void @tl_mem_function_exit_notail()
  ret i64 %sum
}

define void @forgetful() noinline {
  call void @tl_mem_function_enter(i64 1)
  %b = call ptr @tl_mem_get_buffer(i64 0, i64 8)
  store i64 666, ptr %b
  call void @tl_mem_enter_scope()
  ret void
}

; Its slot must still be its own after the call.
define i32 @caller() noinline {
  call void @tl_mem_function_enter(i64 2)
  %mine = call ptr @tl_mem_get_buffer(i64 0, i64 8)
  store i64 42, ptr %mine
  call void @forgetful()
  %after = call ptr @tl_mem_get_buffer(i64 0, i64 8)
  %v = load i64, ptr %after
  %bad = icmp ne i64 %v, 42
  call void @forgetful()
  notail call void @tl_mem_function_exit_notail()
  %r = zext i1 %bad to i32
  ret i32 %r
}

; Outgrown buffers stay readable until the end.
define i32 @strings() noinline {
entry:
  call void @tl_mem_function_enter(i64 1)
  %first = call ptr @tl_mem_get_buffer(i64 0, i64 8)
  store i64 7, ptr %first
  br label %loop
loop:
  %size = phi i64 [ 16, %entry ], [ %size1, %loop ]
  %b = call ptr @tl_mem_get_buffer(i64 0, i64 %size)
  %last = getelementptr i8, ptr %b, i64 %size
  %end = getelementptr i8, ptr %last, i64 -1
  store i8 1, ptr %end
  %size1 = add i64 %size, 1
  %done = icmp sgt i64 %size1, 3000
  br i1 %done, label %out, label %loop
out:
  %old = load i64, ptr %first
  %bad = icmp ne i64 %old, 7
  notail call void @tl_mem_function_exit_notail()
  %r = zext i1 %bad to i32
  ret i32 %r
}

; Returns an object out of two open scopes.
define ptr @early(i1 %leave) noinline {
entry:
  call void @tl_mem_function_enter(i64 0)
  call void @tl_mem_enter_scope()
  call void @tl_mem_enter_scope()
  %o = call ptr @malloc(i64 64)
  call void @tl_mem_register_struct(ptr %o)
  %t = call ptr @malloc(i64 64)
  call void @tl_mem_register_struct(ptr %t)
  br i1 %leave, label %now, label %later
now:
  call void @tl_mem_unregister(ptr %o)
  notail call void @tl_mem_function_exit_notail()
  ret ptr %o
later:
  call void @tl_mem_exit_scope()
  call void @tl_mem_exit_scope()
  notail call void @tl_mem_function_exit_notail()
  ret ptr null
}

define i32 @main() {
  %f = call i64 @fib(i64 15)
  %fb = icmp ne i64 %f, 610
  %w0 = zext i1 %fb to i32
  %w1 = call i32 @caller()
  %w2 = call i32 @strings()
  %o = call ptr @early(i1 true)
  %n = call ptr @early(i1 false)
  %one = call i64 @tl_get_object_count()
  %ob = icmp ne i64 %one, 1
  %w3 = zext i1 %ob to i32
  call void @tl_ptr_release(ptr %o)
  %none = call i64 @tl_get_object_count()
  %nb = icmp ne i64 %none, 0
  %w4 = zext i1 %nb to i32
  %depth = call i64 @tl_get_scope_depth()
  %db = icmp ne i64 %depth, 1
  %w5 = zext i1 %db to i32
  %s1 = add i32 %w0, %w1
  %s2 = add i32 %s1, %w2
  %s3 = add i32 %s2, %w3
  %s4 = add i32 %s3, %w4
  %s5 = add i32 %s4, %w5
  ret i32 %s5
}
