/* The physical limit of starting a program: for each byte on stdin, posix_spawn and wait; prints the nanoseconds.
   usage: spawner UID PROGRAM ARG...   (UID 0 or more: become that user first; -1: stay) */
#define _GNU_SOURCE
#include <grp.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

int main(int argc, char **argv) {
    char *env[] = {NULL}, byte;
    long uid = argc > 2 ? atol(argv[1]) : -2;
    if (uid < -1) return 2;
    if (uid >= 0 && (setgroups(0, NULL) || setresgid(uid, uid, uid) || setresuid(uid, uid, uid))) return 3;
    while (read(0, &byte, 1) == 1) {
        int status;
        pid_t pid;
        long start = now();
        if (posix_spawn(&pid, argv[2], NULL, NULL, argv + 2, env)) return 4;
        if (waitpid(pid, &status, 0) != pid || status) return 5;
        printf("%ld\n", now() - start);
        fflush(stdout);
    }
    return 0;
}
