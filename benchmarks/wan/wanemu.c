/* An internet between network namespaces, for kernels without netem: rates, delays, losses, queues, cut cables.
 *
 *     wanemu PREFIX QUEUE_MS OFFLOAD SEED UP:DOWN:RTT_MS:LOSS_PERCENT ...
 *
 * Opens a TUN device "wan0" in each namespace PREFIX0, PREFIX1, ..., one for every specification of a link, and passes
 * IPv4 packets among them: 10.77.0.1 is the first's address, and so on. A packet goes through its sender's uplink
 * (rate in Mbit/s, tail-drop queue of QUEUE_MS), is lost or delayed by half the mean of both ends' round-trip times,
 * and goes through its receiver's downlink (rate, queue). OFFLOAD 1 lets a "packet" be as much as 64 KiB of one TCP
 * flow, which spares most of the CPU; not to be used with losses, which would then hit 64 KiB at once.
 *
 * Says "ready" on standard output. Then reads lines from standard input: "cut N" loses everything from and to N, "heal
 * N" ends that; "hide N" puts N behind a router that lets nobody in: TCP connections to it are not opened, only from it.
 * The end of input ends the program.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#define MAX_PEERS 64
#define MAX_PACKET 70000
#define BURST 32               /* packets read from one device before the next has its turn */
#define NS_PER_MS 1000000.0
#define NS_PER_S 1000000000LL
#define HEADER ((int)sizeof(struct virtio_net_hdr))

typedef struct {
    int fd, is_cut, is_hidden;
    double up_ns_per_byte, down_ns_per_byte, rtt_ns, loss;
    int64_t up_free_at, down_free_at; /* when all that is queued will have passed */
} Link;

typedef struct {
    int64_t at;     /* when the packet leaves the wire, then the downlink */
    uint64_t order; /* packets of one moment stay in order */
    int from, to, size, is_down;
    unsigned char *bytes;
} Packet;

static Link links[MAX_PEERS];
static int num_links;
static Packet *heap; /* packets on their way; the one that is due first is heap[0] */
static int heap_size, heap_room;
static uint64_t next_order;

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * NS_PER_S + time.tv_nsec;
}

static int is_before(const Packet *a, const Packet *b) {
    return a->at != b->at ? a->at < b->at : a->order < b->order;
}

static void swap(int i, int j) {
    Packet packet = heap[i];
    heap[i] = heap[j];
    heap[j] = packet;
}

static void send_later(Packet packet) {
    if (heap_size == heap_room) {
        heap_room = heap_room ? 2 * heap_room : 4096;
        heap = realloc(heap, heap_room * sizeof *heap);
        if (!heap) { perror("wanemu"); exit(1); }
    }
    packet.order = next_order++;
    int i = heap_size++;
    heap[i] = packet;
    for (; i && is_before(&heap[i], &heap[(i - 1) / 2]); i = (i - 1) / 2)
        swap(i, (i - 1) / 2);
}

static Packet take_first(void) {
    Packet first = heap[0];
    heap[0] = heap[--heap_size];
    for (int i = 0;;) {
        int child = 2 * i + 1;
        if (child + 1 < heap_size && is_before(&heap[child + 1], &heap[child])) child++;
        if (child >= heap_size || !is_before(&heap[child], &heap[i])) return first;
        swap(i, child);
        i = child;
    }
}

/* Returns when a packet that comes at `at` has passed a queue, or -1 if the queue is full. */
static int64_t pass(int64_t *free_at, int64_t at, double ns_per_byte, int num_bytes, int64_t queue_ns) {
    int64_t begins = *free_at > at ? *free_at : at;
    if (begins - at > queue_ns) return -1;
    return *free_at = begins + (int64_t)(num_bytes * ns_per_byte);
}

/* Whether a packet would open a connection, as a router's firewall sees it; all that is not TCP would. */
static int is_opening(const unsigned char *ip, int num_bytes) {
    int header = (ip[0] & 15) * 4;
    if (ip[9] != 6 || num_bytes < header + 14) return 1;
    return (ip[header + 13] & 0x12) == 0x02; /* SYN without ACK */
}

/* Reads what a peer sends and puts it on the wire. */
static void read_from(int i, int64_t queue_ns) {
    static unsigned char bytes[MAX_PACKET];
    Link *link = &links[i];
    for (int count = 0; count < BURST; count++) {
        int size = read(link->fd, bytes, sizeof bytes), num_bytes = size - HEADER;
        if (size <= 0) return;
        const unsigned char *ip = bytes + HEADER;
        if (num_bytes < 20 || ip[0] >> 4 != 4 || ip[16] != 10 || ip[17] != 77 || ip[18] != 0) continue;
        int to = ip[19] - 1;
        if (to < 0 || to >= num_links || to == i || link->is_cut || links[to].is_cut) continue;
        if (links[to].is_hidden && is_opening(ip, num_bytes)) continue;
        int64_t sent_at = pass(&link->up_free_at, now_ns(), link->up_ns_per_byte, num_bytes, queue_ns);
        if (sent_at < 0 || (link->loss > 0 && drand48() < link->loss)) continue;
        Packet packet = {sent_at + (int64_t)((link->rtt_ns + links[to].rtt_ns) / 4), 0, i, to, size, 0, malloc(size)};
        if (!packet.bytes) { perror("wanemu"); exit(1); }
        memcpy(packet.bytes, bytes, size);
        send_later(packet);
    }
}

/* Moves everything that is due on: from the wire into the receiver's queue, from there to the receiver. */
static void deliver(int64_t now, int64_t queue_ns) {
    while (heap_size && heap[0].at <= now) {
        Packet packet = take_first();
        Link *link = &links[packet.to];
        if (link->is_cut || links[packet.from].is_cut) {
            free(packet.bytes);
        } else if (packet.is_down) {
            ssize_t written = write(link->fd, packet.bytes, packet.size);
            (void)written; /* a receiver whose device is down loses it, as it would */
            free(packet.bytes);
        } else {
            int num_bytes = packet.size - HEADER;
            packet.at = pass(&link->down_free_at, packet.at, link->down_ns_per_byte, num_bytes, queue_ns);
            packet.is_down = 1;
            if (packet.at < 0) free(packet.bytes);
            else send_later(packet);
        }
    }
}

/* Opens "wan0" in a namespace; returns to `home`. */
static int open_device(const char *namespace_path, int home, int offload) {
    int namespace = open(namespace_path, O_RDONLY | O_CLOEXEC);
    if (namespace < 0 || setns(namespace, CLONE_NEWNET)) { perror(namespace_path); exit(1); }
    close(namespace);
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC), header = HEADER;
    struct ifreq request = {.ifr_name = "wan0", .ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    if (fd < 0 || ioctl(fd, TUNSETIFF, &request) || ioctl(fd, TUNSETVNETHDRSZ, &header) ||
        ioctl(fd, TUNSETOFFLOAD, offload ? TUN_F_CSUM | TUN_F_TSO4 : 0)) { perror("/dev/net/tun"); exit(1); }
    if (setns(home, CLONE_NEWNET)) { perror("setns"); exit(1); }
    return fd;
}

/* Obeys one line of standard input; returns whether there are more. */
static int obey(void) {
    char line[64];
    int i;
    if (!fgets(line, sizeof line, stdin)) return 0;
    if (sscanf(line, "cut %d", &i) == 1 && i >= 0 && i < num_links) links[i].is_cut = 1;
    else if (sscanf(line, "heal %d", &i) == 1 && i >= 0 && i < num_links) links[i].is_cut = 0;
    else if (sscanf(line, "hide %d", &i) == 1 && i >= 0 && i < num_links) links[i].is_hidden = 1;
    else fprintf(stderr, "wanemu: cannot do %s", line);
    return 1;
}

int main(int argc, char **argv) {
    if (argc < 6 || argc > 5 + MAX_PEERS) {
        fprintf(stderr, "usage: wanemu PREFIX QUEUE_MS OFFLOAD SEED UP:DOWN:RTT_MS:LOSS_PERCENT ... (at most %d)\n",
                MAX_PEERS);
        return 2;
    }
    const int64_t queue_ns = (int64_t)(atof(argv[2]) * NS_PER_MS);
    const int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    struct pollfd polled[MAX_PEERS + 1];
    srand48(atol(argv[4]));
    setvbuf(stdin, NULL, _IONBF, 0); /* poll must see every line */
    num_links = argc - 5;
    for (int i = 0; i < num_links; i++) {
        double up, down, rtt_ms, loss_percent;
        if (sscanf(argv[5 + i], "%lf:%lf:%lf:%lf", &up, &down, &rtt_ms, &loss_percent) != 4 || up <= 0 || down <= 0) {
            fprintf(stderr, "wanemu: %s is no UP:DOWN:RTT_MS:LOSS_PERCENT with rates above 0\n", argv[5 + i]);
            return 2;
        }
        char path[256];
        snprintf(path, sizeof path, "/var/run/netns/%s%d", argv[1], i);
        links[i] = (Link){.fd = open_device(path, home, atoi(argv[3])), .rtt_ns = rtt_ms * NS_PER_MS,
                          .up_ns_per_byte = 8000 / up, .down_ns_per_byte = 8000 / down, .loss = loss_percent / 100};
        polled[i] = (struct pollfd){.fd = links[i].fd, .events = POLLIN};
    }
    polled[num_links] = (struct pollfd){.fd = STDIN_FILENO, .events = POLLIN};
    puts("ready");
    fflush(stdout);
    for (;;) {
        int64_t wait = heap_size ? heap[0].at - now_ns() : NS_PER_S;
        wait = wait < 0 ? 0 : wait;
        struct timespec timeout = {wait / NS_PER_S, wait % NS_PER_S};
        ppoll(polled, num_links + 1, &timeout, NULL);
        if (polled[num_links].revents && !obey()) return 0;
        for (int i = 0; i < num_links; i++)
            if (polled[i].revents & POLLIN) read_from(i, queue_ns);
        deliver(now_ns(), queue_ns);
    }
}
